"""Python in a sandbox: code that a model wrote runs where it can do no harm.

`open_sandbox` finds one, `Sandbox.run` runs a program, `Sandbox.session` keeps names between runs, and `PythonTool`
is the tool that a policy calls. `Session.call` calls a function that a program defined and gets a plain value back.
"""

from agent_r1_tools.python.choose import open_sandbox, probe
from agent_r1_tools.python.python_tool import PythonTool
from agent_r1_tools.python.sandbox import CallError, Limits, Run, Sandbox, SandboxError, Session, State

__all__ = [
    "CallError",
    "Limits",
    "PythonTool",
    "Run",
    "Sandbox",
    "SandboxError",
    "Session",
    "State",
    "open_sandbox",
    "probe",
]

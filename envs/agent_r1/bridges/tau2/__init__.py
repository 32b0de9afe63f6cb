"""tau2-bench: service desks with a policy and tools; the shared base class, and the domain telecom."""

from agent_r1.bridges.tau2.environment import Tau2Env, Tau2TelecomEnv

__all__ = ["Tau2Env", "Tau2TelecomEnv"]

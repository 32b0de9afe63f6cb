"""A server that speaks SandboxFusion's API and runs what it gets in a sandbox of this machine."""

import http.server
import json
import multiprocessing
import threading

import pytest

from agent_r1_tools.python import Limits, open_sandbox, probe


@pytest.fixture
def in_fork():
    """in_fork(child, count): what child(results) puts into the queue `results` in a fork of this process."""

    def run(child, count):
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        process = context.Process(target=child, args=(results,))
        process.start()
        found = [results.get(timeout=120) for _ in range(count)]
        process.join(60)
        assert process.exitcode == 0
        return found

    return run


PROGRAM = """
import os
child = os.fork()
if child == 0:
    os.closerange(3, 64)  # no way out but its output: what counts is how it ends, not what it says of itself
    failed = True
    try:
        exec({code!r}, {{"__name__": "__main__"}})
        failed = False
    finally:
        os._exit(failed)
if os.waitpid(child, 0)[1]:
    raise SystemExit
"""


@pytest.fixture(scope="session")
def sandbox_server():
    """Its address. Programs run in the fork server, or in bubblewrap where that doesn't work."""
    backend = next((name for name in ("fork_server", "bubblewrap") if probe(name) is None), None)
    if backend is None:
        pytest.skip(f"a server needs a sandbox: {probe('bubblewrap')}; {probe('fork_server')}")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert request["language"] == "python"
            memory = request["memory_limit_MB"] << 20
            seconds = request["run_timeout"]
            limits = Limits(seconds, seconds, memory, output=1 << 20, processes=2, files=4 << 20)
            ran = open_sandbox(backend, limits).run(PROGRAM.format(code=request["code"]))
            status = "TimeLimitExceeded" if ran.status == "timeout" else "Finished"
            code = None if ran.status == "timeout" else int(not ran.ok)
            printed = ran.output.rpartition("[no result")[0] if ran.status == "timeout" else ran.output
            result = {"status": status, "execution_time": ran.seconds, "return_code": code, "stdout": printed}
            answer = {
                "status": "Success" if code == 0 else "Failed",
                "message": "",
                "compile_result": None,
                "run_result": result | {"stderr": ""},
                "executor_pod_name": None,
                "files": {},
            }
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()

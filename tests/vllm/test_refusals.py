"""What is refused before any work, each with the cause and the remedy."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from transformers import AutoConfig

from llm_utils.sampling.vllm_client import VLLMClient

pytestmark = pytest.mark.timeout(600)

LEARNER = str(Path(__file__).parents[2] / "learner")


def refusal(url, folder, tokenizer=None):
    with pytest.raises(SystemExit) as raised:
        VLLMClient(url, str(folder), 2, 100, tokenizer=tokenizer)
    message = str(raised.value)
    assert f"--vllm-url {url}: " in message
    assert f"VLLM_SERVER_DEV_MODE=1 vllm serve {folder} --enable-scale-out" in message
    return message


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "localhost:8000", "http://["])
def test_no_server(policy_folder, url):
    assert "no vLLM server answers at this address" in refusal(url, policy_folder)


@pytest.fixture
def pages():
    """pages(answers): a web server with these paths; returns its address."""
    servers = []

    def start(answers):
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path in answers else 404)
                self.end_headers()
                self.wfile.write(json.dumps(answers.get(self.path)).encode())

            def log_message(self, *_):
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for one in servers:
        one.shutdown()
        one.server_close()


def test_another_kind_of_server(policy_folder, pages):
    assert "no vLLM server answers at this address" in refusal(pages({}), policy_folder)


def test_a_server_without_the_routes(policy_folder, pages):
    routes = {"/openapi.json": {"paths": {"/pause": {}, "/resume": {}}}, "/version": {"version": "0.11.0"}}
    message = refusal(pages(routes), policy_folder)
    assert "vLLM 0.11.0 lacks /collective_rpc, /inference/v1/generate, /server_info, /update_weight" in message


def test_a_server_with_another_model(server, policy_folder, tmp_path):
    config = AutoConfig.from_pretrained(policy_folder)
    config.num_hidden_layers += 1
    config.save_pretrained(tmp_path)
    assert "whose num_hidden_layers is 3, but the trainer's" in refusal(server.url, tmp_path)


def test_a_server_with_another_tokenizer(server, policy_folder, tmp_path):
    for file in policy_folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((policy_folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "is not the trainer's" in refusal(server.url, policy_folder, tokenizer=str(tmp_path))


@pytest.mark.parametrize(
    "module, message",
    [
        ("raise ImportError('No module named vllm')", "pip install 'agent-r1[vllm]'"),
        ("__version__ = '0.11.0'", "--engine vllm needs vLLM 0.32 or newer, but this is 0.11.0"),
    ],
)
def test_vllm_is_missing_or_old(policy_folder, tmp_path, module, message):
    (tmp_path / "vllm.py").write_text(module)
    code = f"from llm_utils.sampling.vllm_engine import VLLMEngine; VLLMEngine({str(policy_folder)!r}, 2, 100)"
    path = os.pathsep.join([str(tmp_path), LEARNER, os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert message in result.stderr and "Traceback" not in result.stderr


def test_a_model_that_vllm_cannot_load(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "granite", "architectures": ["NoSuchModel"]}')
    code = f"from llm_utils.sampling.vllm_engine import VLLMEngine; VLLMEngine({str(tmp_path)!r}, 2, 100)"
    path = os.pathsep.join([LEARNER, os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert f"--engine vllm cannot load {tmp_path}" in result.stderr

"""The server's life: how it starts, what it says when it cannot, and how it stops."""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

LONG = {"max_new_tokens": 400, "ignore_eos": True}
SLOW = "--toy=delay_ms=20"


def run_gapless(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "gapless.runtime.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=os.environ | env, check=False
    )


def test_idle_server_stops_at_once_and_leaves_nothing(serve, tmp_path: Path) -> None:
    """SIGTERM ends an idle server within 2 s with exit code 0; its socket directory, 0700, goes with it."""
    (tmp_path / "tmp").mkdir()
    server = serve(env={"TMPDIR": str(tmp_path / "tmp")})
    (directory,) = (tmp_path / "tmp").glob("gapless-*")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    children = server.children()
    assert set(children) == {"scheduler", "detokenizer", "tokenizer_manager"}
    server.process.terminate()
    assert server.wait(2 + 3) == 0
    assert all(child.within(0) for child in children.values())
    assert not directory.exists()


@pytest.mark.parametrize("mode", [(), ("--disable-overlap-schedule",)], ids=["overlap", "synchronous"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(serve, number: signal.Signals, mode: tuple[str, ...]) -> None:
    """New requests get 503, the running stream goes to its end, the exit code is 0."""
    server = serve(SLOW, *mode)
    stream = server.stream(text="a", sampling_params={"max_new_tokens": 100, "ignore_eos": True})
    stream.wait_first()
    server.process.send_signal(number)
    server.wait_health(503, seconds=1.5)
    assert server.generate(text="b").status_code == 503
    stream.wait_end()
    assert stream.done
    assert stream.events[-1]["meta_info"]["completion_tokens"] == 100
    assert server.wait() == 0


def test_a_supervisor_may_signal_every_process(serve) -> None:
    """SIGTERM to launcher and children alike, as systemd sends it, does not cut the running stream."""
    server = serve(SLOW)
    stream = server.stream(text="a", sampling_params={"max_new_tokens": 50, "ignore_eos": True})
    stream.wait_first()
    for child in server.children().values():
        child.send(signal.SIGTERM)
    assert server.stop() == 0
    stream.wait_end()
    assert stream.done
    assert stream.events[-1]["meta_info"]["completion_tokens"] == 50


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(serve, number: signal.Signals) -> None:
    server = serve(SLOW)
    stream = server.stream(text="a", sampling_params=LONG)
    stream.wait_first()
    server.process.send_signal(number)
    server.wait_health(503, seconds=1.5)
    children = server.children()
    server.process.send_signal(number)
    assert server.wait(3) == 128 + number
    assert all(child.within(1) for child in children.values())
    stream.wait_end()
    assert not stream.done


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_it_loads(serve, number: signal.Signals, tmp_path: Path) -> None:
    """Nothing is open yet: it stops at once, with 0, and leaves nothing."""
    (tmp_path / "tmp").mkdir()
    server = serve(healthy=False, env={"TMPDIR": str(tmp_path / "tmp")})
    children = server.children()
    server.process.send_signal(number)
    assert server.wait(2 + 3) == 0
    assert all(child.within(0) for child in children.values())
    assert not re.search(r"Traceback|^gapless: ", server.log, re.MULTILINE)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_draining_is_bounded(serve) -> None:
    """--drain-timeout ends what does not finish: the stream gets an error event, and the exit code is still 0."""
    server = serve(SLOW, "--drain-timeout=0.5")
    stream = server.stream(text="a", sampling_params=LONG)
    stream.wait_first()
    server.process.terminate()
    assert server.wait(10) == 0
    stream.wait_end()
    assert "error" in stream.events[-1]


def test_a_supervisor_may_signal_every_process_as_soon_as_it_starts(serve) -> None:
    """The signal waits until a process has set up what it does with it: exit code 0, as at any later moment."""
    server = serve(healthy=False)
    for child in server.children().values():
        child.send(signal.SIGTERM)
    assert server.stop() == 0, server.log


def test_a_cleaner_of_temporary_files_does_not_harm(serve, tmp_path: Path) -> None:
    """/tmp may be swept while the server runs: it goes on, and stops without a traceback."""
    (tmp_path / "tmp").mkdir()
    server = serve(env={"TMPDIR": str(tmp_path / "tmp")})
    (directory,) = (tmp_path / "tmp").glob("gapless-*")
    shutil.rmtree(directory)
    assert server.generate(text="a").status_code == 200
    assert server.stop() == 0
    assert "Traceback" not in server.log


def test_an_occupied_port_is_found_before_anything_loads() -> None:
    """A port that is taken is named at once, before the model is looked for; the server takes no other port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        started = time.monotonic()
        ended = run_gapless("serve", "--model-path=/nonexistent/model.gguf", "--port", port)
    assert time.monotonic() - started < 3
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert f"--port {port}" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model-path", "/nonexistent/model.gguf"], "/nonexistent/model.gguf"),
        (["--model-path", "toy", "--toy", "delay=5"], "delay"),
        (["--model-path", "toy", "--page-size", "0"], "--page-size"),
    ],
)
@pytest.mark.parametrize("command", [["serve", "--port=0"], ["generate", "text"]])
def test_a_wrong_option_or_model_is_one_line_and_exit_code_2(
    command: list[str], arguments: list[str], named: str
) -> None:
    ended = run_gapless(*command, *arguments, "--log-level=warning")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert named in ended.stderr


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 64])
def test_a_host_that_does_not_exist_is_named(host: str) -> None:
    ended = run_gapless("serve", "--model-path=toy", "--host", host)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert f"--host {host}" in ended.stderr


def test_two_servers_do_not_hear_each_other(serve, tmp_path: Path) -> None:
    """Each has a private directory of its own, also next to what a crashed one left behind."""
    (tmp_path / "tmp").mkdir()
    environment = {"TMPDIR": str(tmp_path / "tmp")}
    crashed = serve(env=environment)
    children = crashed.children()
    crashed.process.kill()
    crashed.wait()
    assert all(child.within(5) for child in children.values())
    left = set((tmp_path / "tmp").glob("gapless-*"))
    assert len(left) == 1
    servers = [serve("--toy=seed=1", env=environment), serve("--toy=seed=2", env=environment)]
    assert len(set((tmp_path / "tmp").glob("gapless-*"))) == 3
    body = {"text": "a", "sampling_params": {"max_new_tokens": 16, "ignore_eos": True}}
    answers = [server.generate(**body).json()["output_ids"] for server in servers * 2]
    assert answers[0] == answers[2] != answers[1] == answers[3]


def test_killed_launcher_leaves_no_child_and_frees_the_port(serve) -> None:
    """The launcher dies by SIGKILL while one child is stopped: all children are gone in 5 s, the port can be bound."""
    server = serve(SLOW)
    stream = server.stream(text="a", sampling_params=LONG)
    stream.wait_first()
    children = server.children()
    children["scheduler"].send(signal.SIGSTOP)
    server.process.kill()
    server.wait()
    deadline = time.monotonic() + 5
    assert all(child.within(max(0, deadline - time.monotonic())) for child in children.values())
    stream.wait_end()
    again = serve(f"--port={httpx.URL(server.url).port}")
    assert again.url == server.url
    assert again.generate(text="a").status_code == 200


@pytest.mark.parametrize("model", ["toy", "demo"])
def test_it_serves_without_a_gpu_and_says_so(serve, tmp_path: Path, model: str) -> None:
    """No CUDA device, and no CUDA package: it serves on the CPU; one line of the log says which device and why."""
    for package in ("cuda", "cupy", "flash_attn", "flashinfer", "sgl_kernel", "triton", "vllm", "xformers"):
        (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}')")
    server = serve(f"--model-path={model}", env={"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(tmp_path)})
    body = {"text": "a", "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    assert server.generate(**body).json()["meta_info"]["completion_tokens"] == 2
    (line,) = re.findall(r"device: .+", server.log)
    if model == "demo":
        assert line.startswith("device: CPU ")
        assert "(no CUDA device)" in line

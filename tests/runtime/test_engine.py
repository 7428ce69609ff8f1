"""The offline engine: the server's answers without a server, from any thread, and one clear error when it dies."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gapless import Engine
from gapless.runtime.core.errors import (
    ConfigError,
    InternalError,
    ModelLoadError,
    RequestError,
    UnavailableError,
)
from gapless.runtime.core.messages import Finish
from gapless.runtime.model.toy import ToyKnobs, toy_output

PARAMS = {"max_new_tokens": 8, "ignore_eos": True}
LONG = {"max_new_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with Engine("toy") as engine:
        yield engine
        check_idle(engine)


@pytest.fixture
def slow() -> Iterator[Engine]:
    with Engine("toy", toy="delay_ms=20") as engine:
        yield engine
        check_idle(engine)


def check_idle(engine: Engine) -> None:
    """Waits until the scheduler is at rest; then its accounting must be exact. An engine that died has none."""
    front, deadline = engine._host._front, time.monotonic() + 10
    while front.health()["status"] == "ok":
        beat = front.heartbeat
        if not (beat.running or beat.waiting or beat.used_tokens):
            assert beat.violations == 0
            return
        assert time.monotonic() < deadline, f"not idle: {beat}"
        time.sleep(0.05)


def expected(text: str, count: int = 8) -> list[int]:
    return toy_output(ToyKnobs(), list(text.encode()), count)


def test_one_prompt_gives_a_dict_in_the_servers_form(shared: Engine) -> None:
    answer = shared.generate("hello", PARAMS)
    assert answer["output_ids"] == expected("hello")
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 8)


def test_a_list_gives_a_list_in_order_with_parameters_of_its_own(shared: Engine) -> None:
    prompts = ["a", "b", "c"]
    answers = shared.generate(prompts, [PARAMS | {"max_new_tokens": n} for n in (1, 8, 3)])
    assert [a["output_ids"] for a in answers] == [
        expected(p, n) for p, n in zip(prompts, (1, 8, 3), strict=True)
    ]


def test_input_ids(shared: Engine) -> None:
    assert shared.generate(input_ids=[104, 105], sampling_params=PARAMS)["output_ids"] == expected("hi")
    assert [a["output_ids"] for a in shared.generate(input_ids=[[104], [105]], sampling_params=PARAMS)] == [
        expected("h"),
        expected("i"),
    ]


def test_a_stream_ends_with_the_whole_answer(shared: Engine) -> None:
    chunks = list(shared.generate("hello", PARAMS, stream=True))
    assert chunks[-1]["output_ids"] == expected("hello")
    assert chunks[-1]["meta_info"]["finish_reason"] is not None
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])


def test_a_stream_of_a_batch_names_the_prompt(shared: Engine) -> None:
    last = {chunk["index"]: chunk["output_ids"] for chunk in shared.generate(["a", "b"], PARAMS, stream=True)}
    assert last == {0: expected("a"), 1: expected("b")}


def test_increments() -> None:
    with Engine("toy", incremental_streaming_output=True) as engine:
        chunks = list(engine.generate("hello", PARAMS, stream=True))
    assert [i for chunk in chunks for i in chunk["output_ids"]] == expected("hello")


def test_many_threads_at_once(shared: Engine) -> None:
    prompts = [f"prompt {i}" for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: shared.generate(prompt, PARAMS)["output_ids"], prompts))
    assert answers == [expected(prompt) for prompt in prompts]


def test_made_and_used_in_a_thread_that_ends() -> None:
    """The engine outlives the thread that made it."""
    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(Engine, "toy").result()
        assert pool.submit(engine.generate, "a", PARAMS).result()["output_ids"] == expected("a")
    with engine:
        assert engine.generate("b", PARAMS)["output_ids"] == expected("b")


def test_it_leaves_signal_handlers_alone() -> None:
    """Also in the main thread, where it could install some."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    with Engine("toy"):
        assert [signal.getsignal(number) for number in numbers] == before
    assert [signal.getsignal(number) for number in numbers] == before


def test_inside_a_running_event_loop() -> None:
    async def lifespan() -> list[object]:
        with Engine("toy") as engine:
            plain = engine.generate("a", PARAMS)["output_ids"]
            several = await asyncio.gather(*(engine.async_generate(text, PARAMS) for text in "bc"))
            chunks = [chunk async for chunk in await engine.async_generate("d", PARAMS, stream=True)]
            return [plain, *(answer["output_ids"] for answer in several), chunks[-1]["output_ids"]]

    assert asyncio.run(lifespan()) == [expected(text) for text in "abcd"]


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"prompt": None}, "text"),
        ({"prompt": []}, "text"),
        ({"prompt": 5}, "text"),
        ({"prompt": ["a", 5]}, "text[1]"),
        ({"prompt": ""}, "text"),
        ({"prompt": "a", "input_ids": [1]}, "input_ids"),
        ({"input_ids": [1, 512]}, "input_ids[1]"),
        ({"prompt": "a", "sampling_params": {"temperature": float("nan")}}, "sampling_params.temperature"),
        ({"prompt": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p"),
        ({"prompt": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"prompt": "a" * 4096}, "text"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_refused_with_its_field(
    shared: Engine, arguments: dict[str, object], param: str, stream: bool
) -> None:
    with pytest.raises(RequestError) as caught:
        shared.generate(**arguments, stream=stream)
    assert caught.value.param == param
    assert shared.generate("a", PARAMS)["output_ids"] == expected("a")


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"model_path": "/nonexistent/model.gguf"}, ModelLoadError, "/nonexistent/model.gguf"),
        ({"model_path": "toy", "toy": "delay=5"}, ConfigError, "delay"),
        ({"model_path": "toy", "page_size": 0}, ConfigError, "--page-size"),
        ({"model_path": "toy", "page_sise": 1}, ConfigError, "page_sise"),
    ],
)
def test_a_wrong_option_or_model_is_raised_in_its_own_class(
    options: dict[str, object], error: type[Exception], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=named):
        Engine(**options)  # type: ignore[arg-type]
    assert capfd.readouterr().err == ""
    assert "gapless-engine" not in {thread.name for thread in threading.enumerate() if not thread.daemon}


def test_a_killed_scheduler_fails_every_call(children_of) -> None:
    """Three waiting calls and a stream raise InternalError; later calls say that the engine has died."""
    others = set(children_of(os.getpid()))
    with Engine("toy", toy="delay_ms=20") as engine, ThreadPoolExecutor(3) as pool:
        (scheduler,) = set(children_of(os.getpid())) - others
        calls = [pool.submit(engine.generate, text, LONG) for text in "abc"]
        stream = engine.generate("d", LONG, stream=True)
        next(stream)
        os.kill(scheduler, signal.SIGKILL)
        for call in calls:
            with pytest.raises(InternalError, match="the scheduler process died: killed by SIGKILL"):
                call.result(timeout=20)
        with pytest.raises(InternalError, match="SIGKILL"):
            list(stream)
        with pytest.raises(UnavailableError, match="SIGKILL"):
            engine.generate("e")


def test_a_failed_step_fails_the_call() -> None:
    with (
        Engine("toy", toy="raise_at_step=5", log_level="error") as engine,
        pytest.raises(InternalError, match="told to fail at step 5"),
    ):
        engine.generate("a", LONG)


def test_shutdown_ends_open_calls(slow: Engine) -> None:
    stream = slow.generate("a", LONG, stream=True)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(slow.generate, "b", LONG)
        next(stream)
        slow.shutdown()
        assert isinstance(call.exception(timeout=20), UnavailableError)
    with pytest.raises(UnavailableError):
        list(stream)
    with pytest.raises(UnavailableError):
        slow.generate("c")
    slow.shutdown()


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_stream_that_is_left_aborts_its_request(how: str) -> None:
    """The one slot is free for the next request at once, not 2000 steps later."""
    with Engine("toy", toy="delay_ms=20", max_running_requests=1) as engine:
        stream = engine.generate("a", LONG, stream=True)
        next(stream)
        if how == "close":
            stream.close()
        else:
            del stream
            gc.collect()
        assert engine.generate("b", PARAMS)["output_ids"] == expected("b")


def test_cancelling_a_coroutine_aborts_its_request() -> None:
    async def cancelled() -> list[int]:
        with Engine("toy", toy="delay_ms=20", max_running_requests=1) as engine:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.async_generate("a", LONG), 0.2)
            answer = await engine.async_generate("b", PARAMS)
            return answer["output_ids"]

    assert asyncio.run(cancelled()) == expected("b")


def test_cancelling_a_stream_that_has_just_opened_aborts_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler has the request, and the caller's loop does not know it yet."""

    async def cancelled() -> list[int]:
        with Engine("toy", toy="delay_ms=20", max_running_requests=1) as engine:
            futures: list[Future[Any]] = []
            submit = engine._host.submit

            def noted(coroutine: Any) -> Any:
                futures.append(submit(coroutine))
                return futures[-1]

            monkeypatch.setattr(engine._host, "submit", noted)
            opening = asyncio.create_task(engine.async_generate("a", LONG, stream=True))
            await asyncio.sleep(0)
            call = futures[0].result(timeout=20)
            opening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await opening
            answer = await engine.async_generate("b", PARAMS)
            assert call.states[0].finished.finish == Finish.ABORT
            return answer["output_ids"]

    assert asyncio.run(cancelled()) == expected("b")


def test_a_cancelled_wait_for_a_chunk_loses_none() -> None:
    """`asyncio.wait_for(anext(stream), ...)` over and over: all ids come, each once."""

    async def patient() -> list[int]:
        ids: list[int] = []
        with Engine("toy", toy="delay_ms=1", incremental_streaming_output=True) as engine:
            stream = await engine.async_generate(
                "a", {"max_new_tokens": 500, "ignore_eos": True}, stream=True
            )
            while True:
                try:
                    ids += (await asyncio.wait_for(anext(stream), 0.001))["output_ids"]
                except TimeoutError:
                    continue
                except StopAsyncIteration:
                    return ids

    assert asyncio.run(patient()) == expected("a", 500)


def test_a_stream_that_failed_has_ended() -> None:
    with Engine("toy", toy="raise_at_step=5", log_level="error") as engine:
        stream = engine.generate("a", LONG, stream=True)
        with pytest.raises(InternalError):
            list(stream)
        assert list(stream) == []


def test_a_stream_keeps_its_engine() -> None:
    assert list(Engine("toy").generate("a", PARAMS, stream=True))[-1]["output_ids"] == expected("a")


def test_a_forked_process_is_told_to_make_its_own_engine() -> None:
    """A call there would wait for ever: the engine's thread stays behind. The parent's engine is not touched."""
    code = """
import os
from gapless import Engine
engine = Engine("toy")
stream = engine.generate("a", {"ignore_eos": True}, stream=True)
pid = os.fork()
if pid == 0:
    for call in (lambda: engine.generate("b"), lambda: list(stream)):
        try:
            print(call(), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    stream.close()
    engine.shutdown()
    os._exit(0)
os.waitpid(pid, 0)
print(list(stream)[-1]["meta_info"]["completion_tokens"])
"""
    command = [sys.executable, "-P", "-W", "ignore", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, second, parent = ended.stdout.splitlines()
    assert first == second
    assert first.startswith("UnavailableError")
    assert (parent, ended.stderr) == ("128", "")


def test_an_engine_collected_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs in any thread; the engine's own cannot wait for itself."""
    unraised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    engine = Engine("toy")
    loop, thread = engine._host._loop, engine._host._thread
    engine.cycle = engine  # type: ignore[attr-defined]
    gc.disable()
    try:
        del engine
        loop.call_soon_threadsafe(gc.collect)
        thread.join(20)
    finally:
        gc.enable()
    assert not thread.is_alive()
    assert unraised == []


def test_an_interrupt_while_loading_does_not_wait_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the first seconds: neither the tokenizer nor the scheduler is waited for."""
    leave, started = threading.Event(), threading.Event()

    def load(_: str) -> None:
        started.set()
        leave.wait(60)

    monkeypatch.setattr("gapless.runtime.engine_host.load_tokenizer", load)
    others = {thread.ident for thread in threading.enumerate()}
    interrupt = threading.Thread(target=lambda: started.wait(20) and os.kill(os.getpid(), signal.SIGINT))
    interrupt.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            Engine("toy")
        started_here = {thread.name for thread in threading.enumerate() if thread.ident not in others}
        assert "gapless-engine" not in started_here
    finally:
        leave.set()
        interrupt.join()


def test_more_prompts_than_a_server_takes_in_one_request(shared: Engine) -> None:
    assert len(shared.generate(["a"] * 1100, {"max_new_tokens": 1})) == 1100


def test_no_guard_no_shutdown_and_no_torch(tmp_path: Path) -> None:
    """A plain script: no `__main__` guard, an engine that nobody shuts down. It ends by itself and leaves nothing."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom gapless import Engine\nengine = Engine('toy')\n"
        "print(engine.generate('a', {'max_new_tokens': 1})['meta_info']['completion_tokens'], 'torch' in sys.modules)\n"
    )
    (tmp_path / "tmp").mkdir()
    ended = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"TMPDIR": str(tmp_path / "tmp")},
    )
    assert ended.stdout == "1 False\n"
    assert ended.stderr == ""
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_killed_caller_leaves_no_scheduler(watch, children_of) -> None:
    """SIGKILL while the scheduler is stopped: the parent-death signal ends it all the same."""
    code = "from gapless import Engine\nengine = Engine('toy')\nprint('up', flush=True)\ninput()\n"
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdin=-1, stdout=-1) as caller:
        assert caller.stdout is not None
        assert caller.stdout.readline() == b"up\n"
        scheduler = watch(*children_of(caller.pid))
        scheduler.send(signal.SIGSTOP)
        caller.kill()
        assert scheduler.within(5)

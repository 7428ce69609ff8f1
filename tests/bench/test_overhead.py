"""`gapless bench overhead`: the form of its report, what it refuses, and the sums behind its figures. No timing."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from gapless.bench import overhead_rig
from gapless.bench.overhead_client import Requests, Task
from gapless.bench.overhead_meter import Meter, MeteredClock, Sample, Window
from gapless.bench.overhead_rig import Case, EndsOnly, Rig
from gapless.runtime.cli import main
from gapless.runtime.core.messages import Closed, Finish, Heartbeat, Opened, StepOutput, column

KEYS = {
    "batch",
    "lag",
    "steps",
    "streaming",
    "step_us",
    "host_us_median",
    "host_us_p99",
    "cpu_us_median",
    "phases",
    "idle_share",
    "effective_step_us",
    "min_step_us_hidden",
    "finished",
}


def case(**changes):
    fields = {
        "batch": 2,
        "lag": 1,
        "steps": 1,
        "streaming": True,
        "output_len": 0,
        "num_steps": 10,
        "seed": 1,
    }
    return Case(**fields | changes, cost=lambda plan: 1e-4)


@pytest.fixture
def short_probes(monkeypatch):
    monkeypatch.setattr(overhead_rig, "PROBE_STEPS", 4)
    monkeypatch.setattr(overhead_rig, "PROBE_WINDOWS", 1)
    monkeypatch.setattr(overhead_rig, "WARM_UP_STEPS", 4)


def test_the_report_has_a_result_for_each_cell_with_the_promised_keys(short_probes, tmp_path, capsys):
    files = {name: tmp_path / f"report.{name}" for name in ("json", "html", "trace")}
    options = [f"--{name}={path}" for name, path in files.items()]
    assert main(["bench", "overhead", "--batch=1,3", "--num-steps=8", "--step-us=200", *options]) == 0
    report = json.loads(files["json"].read_text())
    results = report["results"]
    cells = [(result["batch"], result["lag"], result["steps"]) for result in results]
    assert cells == [(b, lag, steps) for b in (1, 3) for lag in (0, 1) for steps in (1, 4)]
    for result in results:
        assert set(result) == KEYS
        assert {"receive", "plan", "launch", "retire", "send"} <= set(result["phases"])
        assert result["step_us"] == pytest.approx(200)
        assert result["effective_step_us"] == pytest.approx(200 / (1 - result["idle_share"]))
        assert result["host_us_p99"] >= result["host_us_median"] > 0 < result["cpu_us_median"]
        assert result["finished"] == 0
    assert all(result["min_step_us_hidden"] is None for result in results if result["lag"] == 0)
    assert report["sleep_overshoot_us"]["p99"] >= report["sleep_overshoot_us"]["median"]
    assert files["html"].read_text().count("<svg") == 2
    spans = [event["name"] for event in json.loads(files["trace"].read_text()) if event["ph"] == "X"]
    assert spans.count("wait") == sum(name.startswith("step ") for name in spans) >= 8 * len(results)
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(results)


def test_requests_that_end_are_replaced_and_the_roofline_model_gives_the_step(short_probes, tmp_path):
    path = tmp_path / "report.json"
    options = ["--sim-device=H200", "--sim-model=gemma-3-270m", "--output-len=4", "--no-streaming"]
    more = ["--batch=2", "--num-steps=60", "--num-scheduler-steps=1", f"--json={path}"]
    assert main(["bench", "overhead", *options, *more]) == 0
    for result in json.loads(path.read_text())["results"]:
        assert result["finished"] > 10 and result["streaming"] is False
        assert 120 < result["step_us"] < 200  # 0.54 GB of weights at 4.8 TB/s, now and then with a prompt


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch=0"], "--batch: 0: batch sizes must be at least 1"),
        (["--batch=4,x"], "--batch"),
        (["--num-steps=1"], "--num-steps 1: must be at least 2"),
        (["--num-scheduler-steps=0"], "--num-scheduler-steps 0: must be at least 1"),
        (["--output-len=-1"], "--output-len -1: must be at least 0"),
        (["--step-us=0"], "--step-us 0: must be between 1 and 100000"),
        (["--step-us=5", "--sim-device=H100"], "--step-us and --sim-device"),
        (["--sim-device=B300"], "--sim-device: invalid choice"),
        (["--sim-model=llama-3-8b"], "--sim-model needs --sim-device"),
    ],
)
def test_a_wrong_option_is_named(options, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["bench", "overhead", *options])
    error = capsys.readouterr().err
    assert exit.value.code == 2 and message in error and error.count("\n") == 1


def test_an_unknown_model_is_named(capsys):
    assert main(["bench", "overhead", "--sim-device=H100", "--sim-model=llama-9"]) == 2
    assert "--sim-model llama-9" in capsys.readouterr().err


def test_the_steps_of_a_composition_share_its_cost():
    costs = [9.0, 1.0, 1.0, 1.0] * 2 + [9.0]
    samples = [Sample(host, 2 * host, {"plan": host, "send": 0.5}) for host in costs]
    window = Window(samples, steps=9, busy=8.0, idle=2.0, finished=0)
    host, cpu, phases = window.per_step(4)
    assert (host.tolist(), cpu.tolist(), phases) == ([3.0, 3.0], [6.0, 6.0], {"plan": 3.0, "send": 0.5})
    assert window.idle_share == 0.2 and window.effective_step == pytest.approx(10 / 9)


def test_a_sample_spans_from_one_wait_to_the_next():
    meter = Meter(None)
    clock = MeteredClock(meter)
    clock.wait_until(clock.now())
    meter.phase("plan", 1.0, 3.0)
    meter.phase("wait", 3.0, 4.0)
    meter.phase("idle", 4.0, 4.5)
    meter.phase("plan", 4.5, 5.5)
    entered = clock.now()
    clock.wait_until(entered)
    assert [sample.phases for sample in meter.samples] == [{}, {"plan": 3.0}]
    assert meter.without_work == 0.5
    meter.waited(entered=meter._left + 2.0, used=meter._used + 3.0, spun=0.25, left=0.0)
    assert meter.samples[-1].host == pytest.approx(2.0)
    meter.waited(entered=1.0, used=meter._used + 3.0, spun=0.0, left=0.0)
    assert meter.samples[-1].cpu == pytest.approx(3.0 - 0.25)  # without what the wait itself spun


@pytest.mark.parametrize("needed", [50e-6, 333e-6, 19e-3])
def test_the_shortest_hidden_step_is_found_within_a_percent(needed, monkeypatch):
    monkeypatch.setattr(Rig, "_hidden", lambda self, seconds: seconds >= needed)
    assert Rig(case()).min_step_hidden(60e-6) == pytest.approx(needed, rel=0.011)


def test_there_may_be_no_such_step(monkeypatch):
    monkeypatch.setattr(Rig, "_hidden", lambda self, seconds: False)
    assert Rig(case()).min_step_hidden(60e-6) is None


def test_not_streaming_sends_only_beginnings_and_ends():
    def step(finish, opened=(), closed=()):
        columns = [column([1, 2], "<i4")] * 3
        return StepOutput(list(opened), *columns, column(finish, "u1"), list(closed))

    opened = Opened(1, 1, 0, 3, 0, (), False, False)
    ended = [
        step([0, int(Finish.LENGTH)]),
        step([0, 0], opened=[opened]),
        step([0, 0], closed=[Closed(1, Finish.ABORT)]),
    ]
    sent = []
    outbox = EndsOnly(SimpleNamespace(send=sent.append))
    beat = Heartbeat(1.0, 0.0, 1, 0, 3, 7)
    for message in [step([0, 0]), *ended, beat]:
        outbox.send(message)
    assert sent == [*ended, beat]


def test_lengths_have_the_mean_that_is_asked_for_and_prompts_differ():
    task = Task("", alive=1, input_len=128, output_len=64, max_output=640, vocab_size=32_000, seed=3)
    requests = Requests(task)
    submits = [requests.next() for _ in range(4000)]
    lengths = np.array([submit.params.max_new_tokens for submit in submits])
    assert lengths.min() >= 1 and lengths.max() <= 640
    assert lengths.mean() == pytest.approx(64, rel=0.06)
    assert len({submit.input_ids for submit in submits}) == 4000
    assert {len(submit.input_ids) for submit in submits} == {4 * 128}

"""The tree of a program, drawn without a model."""

from __future__ import annotations

from pathlib import Path

import gapless
from gapless import ProgramState, gen, select


@gapless.function
def tips(s: ProgramState, topic: str, count: int = 2) -> None:
    s += gapless.system("Be brief.")
    s += f"Tips on {topic}: " + gen("list", max_tokens=20, n=2) + select("kind", ["a", "b"])
    forks = s.fork(count)
    for i, fork in enumerate(forks):
        fork += f"Tip {i}: " + gen("tip", stop="\n")
    forks.join()
    with s.var_scope("end"):
        s += "In short: " + "".join(s["tip"]) + gen()


def test_the_tree() -> None:
    trace = tips.trace(count=2)
    assert trace.error is None
    assert (
        str(trace)
        == """\
program 'tips'
├─ system begins
├─ text of 9: 'Be brief.'
├─ system ends
├─ text of 17: 'Tips on {topic}: '
├─ gen list, max_new_tokens=20, n=2
├─ select kind of ['a', 'b'] by token_length_normalized
├─ fork of 2 that share 26 characters and 2 calls
│  ├─ fork 0
│  │  ├─ text of 7: 'Tip 0: '
│  │  └─ gen tip, stop='\\n'
│  └─ fork 1
│     ├─ text of 7: 'Tip 1: '
│     └─ gen tip, stop='\\n'
├─ variable end begins
├─ text of 20: 'In short: {tip}{tip}'
├─ gen
└─ variable end ends"""
    )


def test_forks_of_forks_share_what_is_before_them() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        outer = s.fork(1)[0]
        outer += "abc" + gen("x")
        outer.fork(1)[0].__iadd__("d")

    assert (
        str(program.bind().trace(backend=None))
        == """\
program 'program'
└─ fork of 1 that share 0 characters and 0 calls
   └─ fork 0
      ├─ text of 3: 'abc'
      ├─ gen x
      └─ fork of 1 that share 3 characters and 1 calls
         └─ fork 0
            └─ text of 1: 'd'"""
    )


def test_a_program_that_needs_a_real_value_ends_there() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "How many? " + gen("n")
        s += str(int(s["n"]) + 1)

    trace = program.trace()
    lines = str(trace).splitlines()
    assert lines[:3] == ["program 'program'", "├─ text of 10: 'How many? '", "└─ gen n"]
    assert lines[3].startswith(f"ended by: program 'program', {Path(__file__).name} line ")
    assert lines[3].endswith("ValueError: invalid literal for int() with base 10: '{n}'")


def test_a_program_that_never_ends_is_ended() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s["x"] = ""
        while "stop" not in s["x"]:
            s += gen("x")

    assert "the trace was ended after 10000 steps" in str(program.trace().error)

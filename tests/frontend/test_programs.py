"""A program's text, variables and turns, one primitive a test, against a model in memory."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from contextvars import ContextVar
from typing import Any

import pytest
from scripted_backend import ScriptedBackend, refuse

import gapless
from gapless import ProgramState, gen, select
from gapless.frontend.backends.base import Message
from gapless.frontend.loop import the_loop


@pytest.fixture
def model() -> ScriptedBackend:
    backend = ScriptedBackend()
    gapless.set_default_backend(backend)
    return backend


def test_each_call_has_all_the_text_before_it(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState, word: str) -> int:
        s += "one " + gen("a") + word
        s += gen("b")
        return len(s["b"])

    state = program.run(word=" two ")
    assert model.texts() == ["one ", "one <4> two "]
    assert state.text() == "one <4> two <12>"
    assert (state["a"], state.get_var("b"), state.ret_value) == ("<4>", "<12>", 4)
    assert state.get_meta_info("b") == {"prompt_chars": 12}
    assert "a" in state
    assert "c" not in state
    assert str(state) == "ProgramState(one <4> two <12>)"
    assert state.error() is None


def test_appending_does_not_wait_and_reading_does() -> None:
    """A call whose result nobody reads ends before the run does, not before the function does."""
    backend, returned = ScriptedBackend(held=True), threading.Event()

    @gapless.function
    def program(s: ProgramState) -> None:
        s += "x" + gen("a") + gen("b")
        returned.set()

    state = program.run(backend=backend, stream=True)
    assert returned.wait(30)
    backend.let_go()
    assert state.text() == "x<1><4>"


def test_parameters_of_a_run_are_the_defaults_of_its_calls(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState, n: int) -> None:
        s += gen(max_tokens=3, temperature=0.5) + gen(stop="\n")

    program.run(n=7, temperature=0, max_new_tokens=9, top_p=None)
    assert [call.params for call in model.calls if call.kind == "generate"] == [
        {"temperature": 0.5, "max_new_tokens": 3},
        {"temperature": 0, "max_new_tokens": 9, "stop": "\n"},
    ]


def test_several_samples_are_a_list_and_the_first_goes_on(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "ab" + gen("x", n=3) + "."

    state = program.run()
    assert state["x"] == ["<2>", "<2.1>", "<2.2>"]
    assert state.text() == "ab<2>."
    assert state.get_meta_info("x") == [{"prompt_chars": 2}] * 3


def test_a_choice_is_text_and_variable() -> None:
    backend = ScriptedBackend(lambda text, _: "tea" if "drink" in text else "<>")

    @gapless.function
    def program(s: ProgramState) -> str:
        s += "drink " + select("d", choices=["coffee", "tea"]) + "!"
        return "yes" if s["d"] == "tea" else "no"

    state = program.run(backend=backend)
    assert (state.text(), state.ret_value) == ("drink tea!", "yes")
    assert state.get_meta_info("d") == {"scores": (0.0, 1.0)}
    assert backend.calls[0].params == {"choices": ("coffee", "tea"), "method": "token_length_normalized"}


def turns(s: ProgramState, style: str) -> None:
    if style == "expressions":
        s += gapless.system("S") + gapless.user("U")
        s += gapless.assistant("so " + gen("a"))
    elif style == "methods":
        s.system("S")
        s.user("U")
        s.assistant("so " + gen("a"))
    elif style == "blocks":
        with s.system():
            s += "S"
        with s.user():
            s += "U"
        with s.assistant():
            s += "so "
            s += gen("a")
    else:
        s += gapless.system_begin() + "S" + gapless.system_end() + gapless.user_begin() + "U"
        s += gapless.user_end() + gapless.assistant_begin() + "so " + gen("a") + gapless.assistant_end()
    s += gapless.user("V")


@pytest.mark.parametrize("style", ["expressions", "methods", "blocks", "marks"])
def test_turns_in_all_spellings(model: ScriptedBackend, style: str) -> None:
    state = gapless.function(turns).run(style=style)
    assert state.text() == "[system]S[end][user]U[end][assistant]so <40>[end][user]V[end]"
    assert state.messages() == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "so <40>"},
        {"role": "user", "content": "V"},
    ]
    assert model.calls[0].messages == (Message("system", "S"), Message("user", "U"))


@pytest.mark.parametrize("outside", ["before", "after", "user"])
def test_a_prompt_is_a_conversation_only_where_all_of_it_is_said_in_turns(
    model: ScriptedBackend, outside: str
) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        if outside == "before":
            s += "hello"
        s += gapless.user("U" + gen() if outside == "user" else "U")
        s += gen() if outside == "after" else gapless.assistant("A")

    program.run()
    assert [call.messages for call in model.calls if call.kind == "generate"] == [None] * (
        outside != "before"
    )


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        (gapless.user(gapless.user_begin()), "a turn of user begins inside of one of user"),
        (gapless.user_end(), "a turn of user ends that did not begin"),
        (gapless.user_begin() + gapless.system_end(), "a turn of system ends that did not begin"),
    ],
)
def test_marks_that_do_not_match(model: ScriptedBackend, marks: Any, message: str) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += marks

    with pytest.raises(gapless.ProgramError, match=message):
        program.run()


def test_the_text_of_a_scope_is_a_variable(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "a"
        with s.var_scope("outer"):
            s += "b" + gen()
            with s.var_scope("inner"):
                s += "c"
        s += "d"

    state = program.run()
    assert (state["outer"], state["inner"], state.text()) == ("b<2>c", "c", "ab<2>cd")


def test_a_variable_can_be_set(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s.set_var("x", 1)
        s["y"] = s["x"] + 1

    state = program.run()
    assert (state["x"], state["y"]) == (1, 2)


def test_a_name_that_is_set_again_has_its_last_value(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> list[str]:
        seen = []
        for _ in range(3):
            s += "." + gen("x")
            seen.append(s["x"])
        return seen

    assert program.run().ret_value == ["<1>", "<5>", "<9>"]


def test_arguments_are_checked_before_anything_runs(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState, question: str, temperature: float = 1.0) -> float:
        return temperature

    for arguments in ({}, {"question": "?", "heat": 1}):
        with pytest.raises(TypeError, match=r"program 'program': .*(question|heat)"):
            program.run(**arguments)
    assert program.run("?", temperature=0.5).ret_value == 0.5  # the function's own parameter
    assert program.run("?", use_thread=True).ret_value == 1.0
    with pytest.raises(TypeError, match="needs a first parameter"):
        gapless.function(lambda: None)
    assert not model.calls


def test_bound_arguments(model: ScriptedBackend) -> None:
    @gapless.function(num_api_spec_tokens=8)
    def program(s: ProgramState, a: int, b: int) -> tuple[int, int]:
        """What it does."""
        return a, b

    half = program.bind(a=1)
    assert half.run(b=2).ret_value == (1, 2)
    assert half.bind(b=3)().ret_value == (1, 3)
    assert half.run(a=4, b=2).ret_value == (4, 2)
    with pytest.raises(TypeError, match="has no parameter 'c'"):
        program.bind(c=1)
    assert program.__doc__ == "What it does."


def test_a_program_as_a_part_and_as_a_call_of_another(model: ScriptedBackend) -> None:
    @gapless.function
    def part(s: ProgramState, word: str) -> str:
        s += word + gen("part")
        return word.upper()

    @gapless.function
    def whole(s: ProgramState) -> tuple[str, str]:
        s += "a"
        upper = part(s, "b")
        return upper, part.run(word="alone").text() + s["part"]

    state = whole.run()
    assert state.text() == "ab<2>"
    assert state.ret_value == ("B", "alone<5><2>")
    assert len({call.group for call in model.calls}) == 2


def test_without_a_backend() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += gen()

    with pytest.raises(RuntimeError, match=r"no backend: call gapless.set_default_backend"):
        program.run()
    with pytest.raises(TypeError, match="a backend is"):
        gapless.set_default_backend(3)


def test_a_program_sees_its_callers_context_variables(model: ScriptedBackend) -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")

    @gapless.function
    def program(s: ProgramState) -> tuple[str, str]:
        before = variable.get()
        variable.set("inner")
        s += gen("x")
        s["x"]  # another program may run meanwhile
        return before, variable.get()

    variable.set("outer")
    assert [state.ret_value for state in program.run_batch([{}] * 3)] == [("outer", "inner")] * 3
    assert variable.get() == "outer"


def test_all_programs_run_in_one_thread(model: ScriptedBackend) -> None:
    @gapless.function
    def program(s: ProgramState) -> str:
        s += gen("x")
        s["x"]
        return threading.current_thread().name

    assert {program.run().ret_value for _ in range(3)} == {"gapless-frontend"}


def test_only_the_program_appends_and_only_while_it_runs(model: ScriptedBackend) -> None:
    kept = []

    @gapless.function
    def program(s: ProgramState) -> None:
        kept.append(s)

    @gapless.function
    def thief(s: ProgramState) -> None:
        kept[0].__iadd__("x")

    state = program.run()
    with pytest.raises(gapless.ProgramError, match="only the program itself appends"):
        state += "x"
    with pytest.raises(gapless.ProgramError, match="'program' has ended: nothing can be appended"):
        thief.run()


@pytest.mark.parametrize("call", [lambda s: s["x"], lambda s: s.text(), lambda s: s.sync()])
def test_reads_in_the_middle_wait_for_what_they_need(call: Any) -> None:
    backend = ScriptedBackend()

    @gapless.function
    def program(s: ProgramState) -> list[str]:
        s += "1" + gen("x")
        call(s)
        done = backend.texts()
        s += gen("y")
        return done

    assert program.run(backend=backend).ret_value == ["1"]


def test_ended_states_are_not_kept_alive(model: ScriptedBackend) -> None:
    """Nor by a cycle, which would keep those of a large batch until the collector comes."""

    @gapless.function
    def program(s: ProgramState) -> None:
        s += "a" + gen("x")
        forks = s.fork(2)
        forks += gen("y")
        forks.join()

    gc.disable()
    try:
        states = program.run_batch([{}] * 3)
        watched = [weakref.ref(state._branch) for state in states]
        assert [state["y"] for state in states] == [["<4>", "<4>"]] * 3
        del states
        the_loop().wait(pass_by())
        assert [ref() for ref in watched] == [None] * 3
    finally:
        gc.enable()


async def pass_by() -> None:
    """The loop has done what it had to do before."""


def test_an_interrupt_of_the_caller_ends_the_run() -> None:
    backend = ScriptedBackend(held=True)
    main = threading.main_thread().ident
    assert main is not None

    @gapless.function
    def program(s: ProgramState) -> str:
        s += "x"
        forks = s.fork(2)
        forks += gen("a")
        signal.pthread_kill(main, signal.SIGINT)
        return str(forks[1]["a"])

    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)
    assert backend.released.wait(30)
    assert backend.kinds()[0] == "commit"
    assert backend.kinds()[-1] == "release"
    assert all(call.cancelled for call in backend.calls[1:-1])


def test_an_unread_failure_is_the_runs() -> None:
    @gapless.function
    def program(s: ProgramState) -> None:
        s += "x" + gen("a")

    with pytest.raises(gapless.ProgramError, match="BackendError: the model is gone"):
        program.run(backend=ScriptedBackend(refuse))

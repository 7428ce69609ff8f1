"""Renders one chat template for its parent: `python -m gapless.runtime.tokenizer.chat_template_worker`.

The first line of its input is the template; every further line is the variables of one prompt, and is answered by one
line. Templates come with model files, so that they are bounded from outside: a rendering that takes more than
`CPU_SECONDS` ends the process (by a signal that no code of the template can hold up), and memory is limited.
"""

from __future__ import annotations

import resource
import signal
import sys

import msgspec

from gapless.runtime.tokenizer.chat_template import ChatTemplate, TemplateError
from gapless.runtime.tokenizer.chat_template_process import CPU_SECONDS, Rendered
from gapless.runtime.tokenizer.chat_template_render import Rendering

MAX_MEMORY_BYTES = 1 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    template = msgspec.json.decode(sys.stdin.buffer.readline(), type=ChatTemplate)
    rendering: Rendering | None = None
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            rendering = rendering or Rendering(template)
            answer = Rendered(text=rendering.render(msgspec.json.decode(line)))
        except TemplateError as error:
            answer = Rendered(error=str(error))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()

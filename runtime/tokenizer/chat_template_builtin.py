"""Chat templates for models that come without one, in the formats that these families are trained on.

Tools are described in the words that their families know; chatml's are Hermes', which Qwen has taken over, and Gemma,
which has no format of its own, is told to use the same.
"""

from __future__ import annotations

_HERMES_TOOLS = """\
{%- macro hermes_tools(tools) -%}
# Tools

You may call one or more functions to answer the user. Their signatures are in <tools></tools>, one a line:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>

To call a function, write a JSON object with its name and arguments in <tool_call></tool_call>:
<tool_call>
{"name": <function name>, "arguments": <object>}
</tool_call>
{%- endmacro -%}
{%- macro hermes_calls(message) -%}
{%- for call in message.tool_calls or [] -%}
{{ '\\n' if message.content or not loop.first }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
{%- endmacro -%}
"""

_CHATML = (
    _HERMES_TOOLS
    + """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
<|im_start|>system
{{ system }}{{ '\\n\\n' if system and tools }}{{ hermes_tools(tools) if tools }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first %}{{ raise_exception('a system message must be the first') }}{% endif -%}
{%- elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role in ('user', 'assistant') -%}
<|im_start|>{{ message.role }}
{{ message.content }}{{ hermes_calls(message) }}<|im_end|>
{% else -%}
{{ raise_exception('unknown role: ' ~ message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
)

_GEMMA = (
    _HERMES_TOOLS
    + """\
{{- bos_token -}}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set before = system ~ ('\\n\\n' if system and tools else '') ~ (hermes_tools(tools) if tools else '') -%}
{%- for message in turns -%}
{%- if message.role not in ('user', 'assistant', 'tool') -%}
{{ raise_exception('unknown role: ' ~ message.role if message.role != 'system'
                   else 'a system message must be the first') }}
{%- endif -%}
{%- set previous = 'assistant' if loop.first else loop.previtem.role -%}
{%- if message.role == previous != 'tool' or message.role != 'assistant' != previous != message.role -%}
{{ raise_exception('roles must alternate: user, assistant, user, ...') }}
{%- endif -%}
{%- if not message.role == previous == 'tool' -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}
{% endif -%}
{{ before ~ '\\n\\n' if loop.first and before }}
{%- if message.role == 'tool' -%}
<tool_response>
{{ message.content }}
</tool_response>
{%- else -%}
{{ message.content | trim }}{{ hermes_calls(message) }}
{%- endif -%}
{{ '\\n' if message.role == 'tool' == loop.nextitem.role else '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
<start_of_turn>model
{% endif -%}
"""
)

_LLAMA_3 = """\
{{- bos_token -}}
{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
<|start_header_id|>system<|end_header_id|>

{{ 'Environment: ipython\\n' if tools }}{{ system }}
{%- if tools -%}
{{ '\\n\\n' if system }}You may call these functions. To call one, answer with nothing but a JSON object
{"name": <function name>, "parameters": <object>}, and no variables in it.
{% for tool in tools %}
{{ tool | tojson(indent=4) }}
{% endfor -%}
{%- endif -%}
<|eot_id|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first %}{{ raise_exception('a system message must be the first') }}{% endif -%}
{%- elif message.role == 'tool' -%}
<|start_header_id|>ipython<|end_header_id|>

{{ message.content }}<|eot_id|>
{%- elif message.role == 'assistant' and message.tool_calls -%}
<|start_header_id|>assistant<|end_header_id|>

{% for call in message.tool_calls -%}
{{ '; ' if not loop.first }}{"name": {{ call.function.name | tojson }}, "parameters": {{ '' -}}
{{ call.function.arguments | tojson }}}
{%- endfor -%}
<|eot_id|>
{%- elif message.role in ('user', 'assistant') -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- else -%}
{{ raise_exception('unknown role: ' ~ message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif -%}
"""

_MISTRAL = """\
{{- bos_token -}}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}
{%- set ns = namespace(users=0, last_user=-1) -%}
{%- for message in turns if message.role == 'user' %}{% set ns.users = ns.users + 1 %}{% endfor -%}
{%- set ns.last_user = ns.users -%}
{%- set ns.users = 0 -%}
{%- for message in turns -%}
{%- if message.role == 'user' -%}
{%- if not loop.first and loop.previtem.role == 'user' -%}
{{ raise_exception('roles must alternate: user, assistant, user, ...') }}
{%- endif -%}
{%- set ns.users = ns.users + 1 -%}
{%- if tools and ns.users == ns.last_user %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ system ~ '\\n\\n' if system and ns.users == ns.last_user }}{{ message.content }}[/INST]
{%- elif message.role == 'assistant' -%}
{%- if message.tool_calls -%}
[TOOL_CALLS] [
{%- for call in message.tool_calls -%}
{{ ', ' if not loop.first }}{"name": {{ call.function.name | tojson }}, "arguments": {{ '' -}}
{{ call.function.arguments | tojson }}
{%- if call.id %}, "id": {{ call.id | tojson }}{% endif %}}
{%- endfor -%}
]{{ eos_token }}
{%- else %} {{ message.content | trim }}{{ eos_token }}
{%- endif -%}
{%- elif message.role == 'tool' -%}
[TOOL_RESULTS] {"content": {{ message.content | tojson }}
{%- if message.tool_call_id %}, "call_id": {{ message.tool_call_id | tojson }}{% endif %}}[/TOOL_RESULTS]
{%- elif message.role == 'system' -%}
{{ raise_exception('a system message must be the first') }}
{%- else -%}
{{ raise_exception('unknown role: ' ~ message.role) }}
{%- endif -%}
{%- endfor -%}
"""

BUILTIN = {"chatml": _CHATML, "gemma": _GEMMA, "llama-3": _LLAMA_3, "mistral": _MISTRAL}

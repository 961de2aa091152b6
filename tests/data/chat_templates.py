"""Chat templates of ten families, rewritten: the constructs that the families' own use, and what
each is rendered with."""

QWEN25 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Be helpful.' }}{%- endif %}
    {{- "\\n\\n# Functions\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<call>{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<result>' + message.content + '</result>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("There is no user message to put the functions into") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are small.<|im_end|>\\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

GEMMA3 = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ boi_token }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Roles must alternate after the system message") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}
                {{- raise_exception("Call ids have 9 characters") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are known") }}
    {%- endif %}
{%- endfor %}
"""

DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}"
    "{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}"
    "{% set ns.is_first_sp = false %}"
    "{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}"
    "{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}"
    "{%- set ns.is_tool = false -%}{{'<|User|>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{'<|Assistant|>' + content + '<|end|>'}}{%- endif %}{%- endfor -%}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|>'}}"
    "{% if thinking %}{{'<think>\\n'}}{% else %}{{'</think>'}}{% endif %}{% endif %}"
)

OLMO = """\
{% set has_system = messages | selectattr('role', 'equalto', 'system') | list | length > 0 %}
{{ bos_token if bos_token is defined else '(none)' }}{{ 'unk' if unk_token is defined }}
{% if not has_system %}
<|system|>
Be brief.{{ ' (' ~ pad_token ~ ')' }}
{% endif %}
{% if documents is not none %}
{% for document in documents %}
  Document {{ loop.index }}: {{ document.title | default('untitled', true) }} {{ document | tojson(separators=(',', ':'), sort_keys=true) }}
{% endfor %}
{% endif %}
{% for message in messages %}
    {% if message.role == 'note' %}{% continue %}{% endif %}
    {% if message.role == 'stop' %}{% break %}{% endif %}
    {% if message['role'] == 'assistant' %}
<|assistant|>
{% generation %}{{ message['content'] | trim }}{{ eos_token }}{% endgeneration %}

    {%- else %}
<|{{ message['role'] }}|>
{{ message['content'] }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""

# No end of an answer: the next message's mark ends it.
GLM45 = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Functions
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{%- macro visible(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set thought = '' %}
{%- set content = visible(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set thought = m.reasoning_content %}
{%- elif '</think>' in content %}
    {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > ns.last_user_index and thought -%}
{{ '\\n<think>' + thought.strip() + '</think>' }}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{%- if m.tool_calls -%}
{%- for call in m.tool_calls -%}
{%- if call.function -%}{%- set call = call.function -%}{%- endif -%}
{{ '\\n<tool_call>' + call.name }}
{% for key, value in call.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value | tojson(ensure_ascii=False) if value is not string else value }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{%- endif -%}
{%- elif m.role == 'tool' -%}
    {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') -%}{{- '<|observation|>' }}{%- endif -%}
    {{- '\\n<tool_response>\\n' + visible(m.content) + '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""

GPT_OSS = """\
{#- Macros that call themselves, with a default; sets inside of them are their own. #}
{%- macro kind(spec, required, nullable=false) -%}
    {%- if spec.type == "array" -%}
        {{- kind(spec['items'], required) + "[]" if spec['items'] else "any[]" }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type[0] is defined -%}
        {{- spec.type | join(" | ") }}
    {%- elif spec.oneOf -%}
        {%- for one in spec.oneOf -%}
            {{- kind(one, required) -}}
            {%- if one.default is defined %}
                {{ "// default: " + one.default|tojson }}
            {%- endif -%}
            {%- if not loop.last %}
                {{- " | " }}
            {% endif -%}
        {%- endfor -%}
    {%- elif spec.type == "object" -%}
        {%- for name, inner in (spec.properties or {}).items() -%}
            {{- name }}{% if name not in (spec.required or []) %}?{% endif %}: {{ kind(inner, spec.required or []) }}
            {%- if not loop.last %}{{- ", " }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{- spec.type or "any" }}
    {%- endif -%}
    {%- if nullable or spec.nullable -%}{{- " | null" }}{%- endif -%}
{%- endmacro -%}
{%- macro functions(space, tools) -%}
    {{- "namespace " + space + " {\\n" }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}
        {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: {" + kind(tool.parameters, []) + "}) => any;\\n" }}
    {%- endfor %}
    {{- "}" }}
{%- endmacro -%}
{%- macro system() -%}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- "Date: " + strftime_now("%Y-%m-%d") + "\\nReasoning: " + reasoning_effort }}
{%- endmacro -%}
{{- "<|im_start|>system\\n" + system() + "<|im_end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set instructions = messages[0].content %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set instructions = "" %}
    {%- set rest = messages %}
{%- endif %}
{%- if instructions or tools %}
    {{- "<|im_start|>developer\\n" + instructions }}
    {%- if tools -%}{{- functions("functions", tools) }}{%- endif -%}
    {{- "<|im_end|>" }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<think>" in message.content %}
            {{- raise_exception("Pass what stands in <think> as the field 'thinking'.") }}
        {%- endif %}
        {%- if "tool_calls" in message %}
            {%- set later = namespace(found=false) %}
            {%- for future in rest[loop.index:] %}
                {%- if future.role == 'assistant' and "tool_calls" not in future %}{%- set later.found = true %}{%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0].function or message.tool_calls[0] %}
            {%- if message.thinking and not later.found %}{{- "analysis: " + message.thinking }}{%- endif %}
            {{- "to=functions." + call.name + (call.content_type if call.content_type is defined else " json") }}
            {{- call.arguments if call.arguments is string else call.arguments|tojson }}
            {%- set called.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}{{- "analysis: " + message.thinking }}{%- endif %}
            {{- "final: " + message.content + "<|im_end|>" }}
        {%- else %}
            {{- "final: " + message.content + "<|im_end|>" }}
            {%- set called.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if called.name is none %}{{- raise_exception("A tool answers, and no message calls it!") }}{%- endif %}
        {{- "functions." + called.name + ": " + message.content|tojson }}
    {%- else -%}
        {{- "<|im_start|>" + message.role + "\\n" + (message.content if message.content is string else "") + "<|im_end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{%- endif -%}
"""

TEMPLATES = {
    "qwen2.5": QWEN25, "qwen3": QWEN3, "llama3": LLAMA3, "smollm2": SMOLLM2, "gemma3": GEMMA3,
    "mistral": MISTRAL, "deepseek": DEEPSEEK, "olmo": OLMO, "glm4.5": GLM45,
    "gpt-oss": GPT_OSS,
}
# tokenizer_config.json beside each template; "boi_token" is of a model's own kind
TOKENS = {
    "bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
    "pad_token": "<|endoftext|>", "boi_token": "<tool>", "add_bos_token": True, "mask_token": None,
}
DATE = "2026-02-03T04:05:06"
TOOL = {"type": "function", "function": {
    "name": "größe", "description": "<b>Size</b> & 'more'",
    "parameters": {"type": "object", "properties": {"x": {"type": "number"}}, "required": []},
}}
CALL = {"id": "abcdefghi", "function": {"name": "größe", "arguments": {"x": 1.5, "a": [True, None]}}}
USER = {"role": "user", "content": " What is 2+3?\n"}
SYSTEM = {"role": "system", "content": " Think <hard>. "}
TURNS = [USER, {"role": "assistant", "content": " It is 5. "}, {"role": "user", "content": "And 3+4?"}]
# name -> (messages, add_generation_prompt, template_kwargs)
CASES = {
    "one question": ([USER], True, {}),
    "without a generation prompt": ([USER], False, {}),
    "system and turns": ([SYSTEM, *TURNS], True, {}),
    "thought": (
        [USER, {"role": "assistant", "content": "<think>\nwell\n</think>\n\n5"}], False, {}),
    "reasoning by another name": (
        [USER, {"role": "assistant", "content": "5", "reasoning": "well"}], False, {}),
    "empty fields": (
        [USER, {"role": "assistant", "content": "5", "tool_calls": None}], False, {}),
    "tool calls": (
        [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
         {"role": "tool", "content": "{\"v\": 7}"}], True, {"tools": [TOOL]}),
    "parts": (
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " Look. "}]}],
        True, {}),
    "wrong roles": ([USER, USER], True, {}),
    "loop controls": (
        [{"role": "note", "content": "n"}, *TURNS, {"role": "stop", "content": "s"}, USER], True, {}),
    "documents": ([USER], True, {"documents": [{"title": None, "text": "é\"<"}, {"text": "b"}]}),
    "no thinking": ([USER], True, {"enable_thinking": False}),
    "thinking": ([USER], True, {"thinking": True}),
    "another date": ([USER], True, {"date_string": "1 Jan 2000"}),
}

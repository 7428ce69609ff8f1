"""Records transformers' ids for the demo model's vocabulary in gemma3_ids.json: run it when the texts change.

python tests/tokenizer/record_gemma3_ids.py
"""

import json
from pathlib import Path

from transformers import AutoTokenizer

from gapless.runtime.core.model_path import resolve_model_path

PROSE = [
    "",
    "a",
    " a",
    "a ",
    " ",
    "Hello, world!",
    "The lighthouse keeper counted forty-one ships before the fog came in.",
    "It's what they'd've said, isn't it? We'll see; I'm sure you're right.",
    "No. 7 cost $1,234.56 on 2024-02-29 at 23:59:59.999+02:00 (up 12.5%).",
    "1 12 123 1234 12345 123456 1234567 3.14159e-10 0x7fff 1_000_000 ½ ² ٣ 四",
    "UPPER lower Title camelCase snake_case kebab-case SCREAMING_SNAKE PascalCase2Go",
    "antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww",
    "!!! ??? ... ,,, ;;; --- ___ === ~~~ ``` ### *** ((( ))) <<< >>> ||| \\\\\\ ///",
    "https://user:pw@example.org:8443/a/b%20c/?q=1&r=%F0%9F%98%80#frag mail@example.org",
    "« guillemets », „Anführung“, “curly” ‘single’ – en — em … ‹x› 「鉤」『二重』",
    "▁ a ▁▁b ▁c▁ (U+2581 written in the text)",
    "Ġword Ċ ĉ (byte-level BPE's letters written in the text)",
]
LANGUAGES = [
    "Grüße aus Köln: Fußgängerübergänge, Straße, ÄÖÜ ß ẞ",
    "Où est l'été ? Ça coûte 3 € — cœur, naïve, Noël, garçon.",
    "El niño comió piñas; ¿qué más? ¡Olé! corazón, pingüino",
    "Zażółć gęślą jaźń. Příliš žluťoučký kůň. Árvíztűrő tükörfúrógép.",
    "Съешь ещё этих мягких французских булок, да выпей же чаю. Її ґанок.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ΆΈΉΊΌΎΏ ᾧ ᾅ",
    "שלום עולם, מה שלומך היום? שָׁלוֹם",
    "مرحبا بالعالم، كيف حالك؟ السَّلَامُ عَلَيْكُمْ ١٢٣٤",
    "नमस्ते दुनिया, आप कैसे हैं? क्षत्रिय श्री ज्ञान १२३",
    "வணக்கம் உலகம் தமிழ் மொழி க்ஷ ஸ்ரீ",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่างระหว่างคำ กำลังน้ำ",
    "ສະບາຍດີ ព្រះរាជាណាចក្រ မင်္ဂလာပါ བོད་སྐད་",
    "你好,世界。今天天气很好,我们去公园散步吧!",
    "繁體中文與簡体中文混排,夾雜 English 與數字 123。",
    "こんにちは世界。カタカナとひらがなと漢字が混ざった文章です。ｶﾀｶﾅ ガ",
    "안녕하세요 세계! 한국어 띄어쓰기를 시험합니다. ㅋㅋㅋ 각",
    "𠮷野家で𩸽を食べる 㐀㐁 𪚥 鿿 豈",
    "ⴰⵣⵓⵍ ᚠᚢᚦ 𐤀𐤁𐤂 𓀀𓀁 ꦲꦤꦕꦫꦏ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ አማርኛ Հայերեն ქართული",
    "Tiếng Việt có nhiều dấu: ướt, nguyễn, Đặng, phở bò.",
    "Kiswahili, Èdè Yorùbá, Íslenska þæð, Gàidhlig, Türkçe İIıi ğş",
]
EMOJI = [
    "😀😃😄 🙂 :-) ☺ ☺️ ☹︎",
    "👩‍👩‍👧‍👦 👨‍🚀 🧑‍💻 🏳️‍🌈 🏴‍☠️ ❤️‍🔥",
    "👍🏻👍🏼👍🏽👍🏾👍🏿 🤷🏽‍♀️ 🧑🏿‍🤝‍🧑🏻",
    "🇩🇪🇫🇷🇯🇵 🇺 🏴󠁧󠁢󠁳󠁣󠁴󠁿 1️⃣ #️⃣",
    "a😀b 😀 c😀😀\n😀\t😀",
    "♠♥♦♣ ∀x∈ℝ: x²≥0 ∑∫∂ ⇒ ≠ ≤ ∞ √2 ⟨ψ|φ⟩ 𝔸𝕓𝒞𝓭 ℵ₀",
    "🫠🫨🪿🛜 🧌 𝄞𝄢 🀄🂡 ⌘⌥⇧ ␀ ☃️",
    "┌─┬─┐│█▓▒░│└─┴─┘ ⠓⠑⠇⠇⠕ ① ⑳ Ⅻ ㍿ ﬁ ﷺ",
]
MARKS = [
    "\u00e9 e\u0301, \u00f1 n\u0303, \u00c5 A\u030a \u212b, o\u0323\u0304 o\u0304\u0323",
    "Z\u0337\u0322\u031b\u034da\u0336\u0327\u031b\u0356l\u0334\u0328\u0354g\u0335\u0322\u033ao\u0338\u0322",
    "q\u0303 x\u030c\u030c\u030c\u030c o\u0361o k\u035fh \u0301 \u0301\u0301a",
    "zero\u200bwidth\u200cjoin\u200dhere\ufeffbom\u2060word\u00adsoft",
    "\u202eright to left\u202c \u200fmark\u200e \u2066isolate\u2069",
    "nbsp\u00a0here thin\u2009em\u2003narrow\u202fideographic\u3000ogham\u1680hair\u200a\u200a\u00a0\u00a0",
    "\ud55c\uae00 \u1112\u1161\u11ab\u1100\u1173\u11af \u3131\u1161 \uac01 \u1100\u1161\u11a8",
    "\u304c \u304b\u3099 \uff76\uff9e \u0f71\u0f72 \u05e9\u05c1\u05b8 \u0e01\u0e4d\u0e32",
]
CONTROL = [
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "<bos>text<eos>",
    "<bos><bos>",
    "<eos>",
    " <bos> a <eos> ",
    "<pad><unk><mask>",
    "<unused0><unused12><unused99> <unused6241> <unused6242>",
    "[multimodal] [ multimodal ] x[multimodal]y",
    "<start_of_image><end_of_image> <image_soft_token>",
    "<start_of_turn <start_of_turn >< end_of_turn> <START_OF_TURN>",
    "<<bos>> <bos><eos<eos>",
    "<table><tr><td>1</td></tr></table> <h1>t</h1> </s> <s> <img src='x'>",
    "<strong>b</strong><em>i</em><code>c</code><br/><li> <ul></ul>",
    "<0x0A> <0x00> <0xFF> <0x0a> <0x41>B",
    "<|endoftext|> <|im_start|> <|eot_id|> [INST] <s>[/INST] <tool_call>",
    "\n<bos>\n",
    "  <end_of_turn>  ",
]
BYTES = [
    "\x00",
    "a\x00b\x00\x00c",
    "".join(map(chr, range(1, 32))),
    "\x7f\x80\x85\x9f\xa0\xad",
    "".join(map(chr, range(0xA0, 0x100))),
    "\ufffd \ufffe \uffff \ufeff",
    "\ue000\uf8ff\U000f0000\U0010ffff",
    "\U0001fbf9\U0001f8ff\U000e0001\U000e0100",
    "a\U00012345b\U00013000\U0001d800\U0002a6df",
    "\u0378\u0530\u0870\u1fff\u2fe0",
    "mixed \u0378語\U0010fffeé\x01 end",
]
CODE = [
    "def f(x, *args, **kw):\n    if x is None:\n        return [i ** 2 for i in range(10)]\n    return x\n",
    "\tif (a && b || !c) {\n\t\treturn arr[i++] -> next;\n\t}\n",
    '#include <stdio.h>\nint main(void) { printf("%d\\n", 0xFF & ~1u); return 0; }\n',
    "SELECT a.id, COUNT(*) AS n FROM t AS a LEFT JOIN u ON a.id = u.id WHERE x <> 'y''z' GROUP BY 1;",
    '{"k": [1, 2.5, null, true], "nested": {"a\\u00e9": "\\n"}}',
    'fn main() -> Result<(), Box<dyn Error>> { let v: Vec<_> = s.split("::").collect(); Ok(()) }',
    '<!DOCTYPE html>\n<html>\n  <body class="a b">\n    <!-- c -->&nbsp;&lt;\n  </body>\n</html>',
    "$ git log --oneline | grep -E '^[0-9a-f]{7}' > out.txt 2>&1 && echo \"${PATH:-none}\"",
    "\\begin{equation} \\frac{\\partial u}{\\partial t} = \\alpha \\nabla^2 u \\end{equation}",
    "const f = async ({a, ...b}) => `${a ?? b?.c}`; // comment /* x */\r\nvar π = 3.14;\r\n",
    "    x = 1\n\n\n        y = 2\n\n\n\n            z = 3\n",
    "| a | b |\n|:--|--:|\n| 1 | 2 |\n\n- [ ] todo\n  - [x] done\n\n> quote\n\n```py\nx\n```\n",
    "diff --git a/x b/x\n@@ -1,2 +1,2 @@\n-old\n+new\n \n",
    "0000 4a6f 686e 2044 6f65 deadbeef-0000-4000-8000-00000000cafe bm90IGEgc2VjcmV0==",
]
RUNS = [
    *(" " * n for n in range(2, 41)),
    *("a" + " " * n + "b" for n in (2, 3, 7, 15, 16, 17, 30, 31, 32, 33, 40)),
    *("\n" * n for n in (1, 2, 3, 8, 30, 31, 32, 33, 40)),
    *("\t" * n for n in (1, 2, 3, 8, 30, 31, 32, 33, 40)),
    *("\t" * n + "x" + " " * n + "\n" * n for n in (1, 2, 4, 33)),
    *("\r\n" * n for n in (1, 2, 5)),
    "\n \n  \n   \n",
    " \t \t\t  \n\t \n",
    "line  \nline\t\n\n  indented\n\tindented \n",
    " leading and trailing  ",
    "a\u2028b\u2029c\x0bd\x0ce",
]


def texts() -> list[str]:
    short = [*PROSE, *LANGUAGES, *EMOJI, *MARKS, *CONTROL, *BYTES, *CODE, *RUNS]
    return [
        *short,
        " ".join([*PROSE, *LANGUAGES, *EMOJI]),
        "".join([*CODE, *CONTROL, *MARKS, *BYTES]),
        "ab c" * 700,
    ]


def main() -> None:
    path = resolve_model_path("demo").path
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    lines = [json.dumps([text, tokenizer.encode(text)]) for text in texts()]
    out = Path(__file__).with_name("gemma3_ids.json")
    out.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()

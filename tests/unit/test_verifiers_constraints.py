# ruff: noqa: RUF001  (letters of many scripts)
"""Instructions that can be checked: each type with texts that follow it and texts that do not."""

from __future__ import annotations

import json
import sys

import pytest

from kedge.ext.ifeval.constraints import (
    CHECKS,
    KNOWN,
    count_sentences,
    detect_language,
    follows,
    load_identifier,
)
from kedge.records.errors import ConfigError, RewardError
from kedge.verifiers import ConstraintVerifier, ifeval

TEXTS = {
    "kn": "ನಾನು ಇಂದು ಬೆಳಿಗ್ಗೆ ಶಾಲೆಗೆ ಹೋದೆನು. ಅಲ್ಲಿ ನನ್ನ ಸ್ನೇಹಿತರನ್ನು ಭೇಟಿಯಾದೆ.",
    "pa": "ਮੈਂ ਅੱਜ ਸਵੇਰੇ ਸਕੂਲ ਗਿਆ ਸੀ ਅਤੇ ਉੱਥੇ ਆਪਣੇ ਦੋਸਤਾਂ ਨੂੰ ਮਿਲਿਆ।",
    "mr": "मी आज सकाळी शाळेत गेलो आणि तिथे माझ्या मित्रांना भेटलो. हा दिवस खूप चांगला होता.",
    "hi": "मैं आज सुबह स्कूल गया और वहाँ अपने दोस्तों से मिला। यह दिन बहुत अच्छा था।",
    "ne": "म आज बिहान विद्यालय गएँ र त्यहाँ मेरा साथीहरूलाई भेटें। आजको दिन धेरै राम्रो थियो।",
    "fa": "من امروز صبح به مدرسه رفتم و در آنجا دوستانم را دیدم. این روز بسیار خوب بود.",
    "ur": "میں آج صبح اسکول گیا اور وہاں اپنے دوستوں سے ملا۔ یہ دن بہت اچھا تھا۔",
    "ar": "ذهبت اليوم إلى المدرسة والتقيت بأصدقائي هناك. كان هذا اليوم جميلا جدا.",
    "vi": "Sáng nay tôi đã đi đến trường và gặp bạn bè của tôi ở đó. Ngày hôm nay rất tốt.",
    "ko": "나는 오늘 아침에 학교에 가서 친구들을 만났습니다.",
    "sw": "Nilikwenda shuleni leo asubuhi na nikakutana na marafiki zangu huko. Siku "
    "hii ilikuwa nzuri sana kwa sisi.",
    "de": "Ich bin heute Morgen in die Schule gegangen und habe dort meine Freunde getroffen.",
    "ru": "Сегодня утром я пошёл в школу и встретил там своих друзей. Это был очень хороший день.",
    "bg": "Тази сутрин отидох на училище и се срещнах с приятелите си там. Денят беше много хубав.",
    "uk": "Сьогодні вранці я пішов до школи і зустрів там своїх друзів. Це був дуже гарний день.",
    "pt": "Hoje de manhã eu fui para a escola e encontrei os meus amigos. O dia foi muito bom.",
    "gu": "હું આજે સવારે શાળાએ ગયો અને ત્યાં મારા મિત્રોને મળ્યો.",
    "te": "నేను ఈ రోజు ఉదయం పాఠశాలకు వెళ్లి నా స్నేహితులను కలిశాను.",
    "it": "Questa mattina sono andato a scuola e ho incontrato i miei amici. La "
    "giornata è stata molto bella.",
    "ta": "நான் இன்று காலை பள்ளிக்குச் சென்று என் நண்பர்களைச் சந்தித்தேன்.",
    "fi": "Menin tänä aamuna kouluun ja tapasin siellä ystäväni. Päivä oli erittäin hyvä.",
    "th": "เช้านี้ฉันไปโรงเรียนและพบเพื่อนของฉันที่นั่น",
    "bn": "আমি আজ সকালে স্কুলে গিয়েছিলাম এবং সেখানে আমার বন্ধুদের সাথে দেখা করেছি।",
    "en": "This morning I went to school and met my friends there. The day was very good.",
    "fr": "Ce matin je suis allé à l'école et j'ai rencontré mes amis. La journée "
    "était très belle.",
    "es": "Esta mañana fui a la escuela y me encontré con mis amigos. El día fue muy bueno.",
    "nl": "Vanochtend ging ik naar school en daar heb ik mijn vrienden ontmoet. Het "
    "was een mooie dag.",
    "ja": "今朝、私は学校に行って友達に会いました。",
    "zh": "今天早上我去了学校,见到了我的朋友。",
    "el": "Σήμερα το πρωί πήγα στο σχολείο.",
    "he": "הבוקר הלכתי לבית הספר ופגשתי את חבריי.",
    "sv": "I morse gick jag till skolan och träffade mina vänner där. Det var en mycket bra dag.",
    "da": "I morges gik jeg i skole og mødte mine venner der. Det var en meget god dag "
    "efter min mening.",
    "no": "I morges gikk jeg på skolen og møtte vennene mine der. Det var en veldig "
    "fin dag etter min mening.",
    "tr": "Bu sabah okula gittim ve orada arkadaşlarımla buluştum. Çok güzel bir gündü.",
    "pl": "Dziś rano poszedłem do szkoły i spotkałem się z przyjaciółmi. To był bardzo "
    "dobry dzień.",
    "id": "Pagi ini saya pergi ke sekolah dan bertemu dengan teman-teman saya di sana.",
    "ro": "În această dimineață am mers la școală și m-am întâlnit cu prietenii mei.",
    "cs": "Dnes ráno jsem šel do školy a potkal jsem tam své přátele. Byl to velmi dobrý den.",
    "hu": "Ma reggel iskolába mentem, és ott találkoztam a barátaimmal. Ez egy nagyon jó nap volt.",
}

CASES: list[tuple[str, dict[str, object], list[str], list[str]]] = [
    (
        "keywords:existence",
        {"keywords": ["correlated", "Mom"]},
        ["My MOM saw correlated data", "correlated moments"],
        ["correlated", "mo m correlate"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["rock", "c++"]},
        ["A rocket", "bedrock", "c+"],
        ["A Rock.", "rock", "in c++, say"],
    ),
    (
        "keywords:frequency",
        {"keyword": "story", "frequency": 2, "relation": "at least"},
        ["Story, story", "storybook story"],
        ["one story", "stories"],
    ),
    (
        "keywords:frequency",
        {"keyword": "story", "frequency": 2, "relation": "less than"},
        ["one story", "none"],
        ["story story"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 4, "let_relation": "at least"},
        ["# a\n## b\n# c"],
        ["# a\n## b"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        ["One. Two! Three?", "A\n\nB\n\nC", 'He said: "No." She left. It rained.', "एक। दो। तीन।"],
        ["Dr. No has 3.14 dollars. Yes.", "One... Two.", "e.g. this. And Mr. Fox", "यह एक है।"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n\n***\n\nb", "***\na\n***\nb\n***"],
        ["a\n\nb", "a\n***\n***\nb", "a *** b *** c", "a ****** b"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["one two three", "one-two three"],
        ["one two", "one, two!"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        ["a\n\nWeekend is", "a\n \n**weekend**, b\n\n"],
        ["a\nweekend", "weekend\n\na", "a\n\nweekends", "a\n\nweekend\n\nb"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] at [address]", "[a] [b] [c]"],
        ["[name]", "[] []", "[a\nb] [c]"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\n\nP.S. I like it", "bye p. s. again", "P.S: more"],
        ["Bye", "PS I like it", "P.P.S. two", "Bye\nP.S."],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Bye\nP.P.S I like it", "P.P.S. I like it"],
        ["P.S. I like it", "PPS it"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "Text:\n* **a**\n* b\n\n---"],
        ["* a", "* a\n* b\n* c", "*a*\n*b*", "1. a\n2. b"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Well. My answer is maybe."],
        ["Yes.", "My answer is yes", "My answer is yes. My answer is no."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a b* and **c**", "***a*** *b*"],
        ["*a b*", "* a\n* b", "** ** **", "*a\nb* *c"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "**Section I** a **Section II** b"],
        ["Section 1\na", "section 1 section 2", "Section one, Section two"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": [1]}', '```json\n{"a": 1}\n```', "```\n[1]\n```"],
        ['{"a": 1} done', "{'a': 1}", "42", "[" * 100_000, '{"a": 1'],
    ),
    (
        "detectable_format:title",
        {},
        ["<<Title>>\ntext", "say <<a b>>"],
        ["<Title>", "<<>>", "<< >>", "<<a\nb>>"],
    ),
    (
        "combination:two_responses",
        {},
        ["a\n******\nb", "******a******b******"],
        ["a", "a******a", "a******b******c", "a***b", "a******"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Write an email.\nBe kind."},
        ["Write an email. Be kind.\n\nDear", "write an email. be kind. ok"],
        ["Dear boss", "Sure! Write an email. Be kind.", "Write a mail. Be kind."],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Is there anything else?"},
        ["Bye. Is there anything else?", '"x is there anything else?" '],
        ["Is there anything else? No.", "anything else?"],
    ),
    (
        "startend:quotation",
        {},
        ['"All of it."', "“All of it.”"],
        ['"Half" of it', '"', "'All'", '""'],
    ),
    (
        "change_case:english_capital",
        {},
        ["THIS IS ALL IN CAPITALS AND IT IS GOOD. 1!"],
        ["THIS is", "123", TEXTS["de"].upper(), TEXTS["hi"]],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["this is all in small letters. 1!"],
        ["This is", "123", TEXTS["fr"].lower()],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["STOP it NOW", "I AM"],
        ["STOP it", "Stop It Now", "S0P 12"],
    ),
    ("punctuation:no_comma", {}, ["No commas; none."], ["One, two", "一，二", "واحد، اثنان"]),
    *(
        ("language:response_language", {"language": code}, [text], [TEXTS[other]])
        for (code, text), other in zip(TEXTS.items(), [*list(TEXTS)[1:], "kn"], strict=True)
    ),
]
NAMED = {
    f"{kind} {list(given.values())}": (kind, given, good, bad) for kind, given, good, bad in CASES
}


def test_every_type_has_cases() -> None:
    assert {kind for kind, *_ in CASES} == set(CHECKS)
    assert len(CHECKS) == 25


@pytest.mark.parametrize("case", NAMED)
def test_followed_and_not(case: str) -> None:
    kind, given, good, bad = NAMED[case]
    needs_languages(kind)
    truth = {"instruction_id_list": [kind], "kwargs": [given | {"another": None}]}
    assert ifeval(good, ground_truth=[truth] * len(good)) == [1.0] * len(good)
    assert ifeval(bad, ground_truth=[json.dumps(truth)] * len(bad)) == [0.0] * len(bad)
    assert ifeval(["", " \n", "<think>a</think> "], ground_truth=[truth] * 3) == [0.0] * 3


def needs_languages(kind: str) -> None:
    if kind.startswith("language:") or "english" in kind:
        pytest.importorskip("py3langid")


def test_languages() -> None:
    pytest.importorskip("py3langid")
    assert {code: detect_language(text) for code, text in TEXTS.items()} == {c: c for c in TEXTS}
    assert KNOWN - set(TEXTS) == {"hy", "ml", "ka"}
    assert detect_language("") is detect_language("123 !?") is detect_language("🙂") is None
    short = ("ok", "hello", "WRITE", "123", "xyzzy qwrt")
    assert [detect_language(text) for text in short] == [None] * 5
    assert detect_language("THIS IS A VERY NICE DAY") == "en"
    mixed = f"{TEXTS['hi']} Python"
    assert detect_language(mixed) == "hi"


def test_a_missing_identifier_is_an_error_that_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    load_identifier.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install 'kedge-rl\[ifeval\]'"):
        follows("some text", "language:response_language", {"language": "en"})
    with pytest.raises(ConfigError, match="py3langid"):
        ifeval.prepare()  # a trainer calls it before it loads a model
    assert follows("some text", "punctuation:no_comma", {})


def test_sentences() -> None:
    assert count_sentences("") == count_sentences("...") == 0
    assert count_sentences("Hello") == 1
    assert count_sentences("今日は。元気？") == 2
    assert count_sentences("I like example.com. It is no. 1!") == 3


def test_scores() -> None:
    truth = {
        "instruction_id_list": ["punctuation:no_comma", "startend:quotation"],
        "kwargs": [{}, {}],
    }
    texts = ['"a b"', "a b", "a, b"]
    assert ifeval(texts, ground_truth=[truth] * 3) == [1.0, 0.5, 0.0]
    every = ConstraintVerifier(score="all")
    assert every(texts, ground_truth=[truth] * 3) == [1.0, 0.0, 0.0]


def test_columns_as_in_the_dataset() -> None:
    ids = [["punctuation:no_comma"], None]
    kwargs = [[{"num_words": None}], None]
    scores = ifeval(["a", "b"], instruction_id_list=ids, kwargs=kwargs, prompts=["", ""])
    assert scores == [1.0, None]


def test_thinking_is_not_looked_at() -> None:
    truth = {"instruction_id_list": ["punctuation:no_comma"]}
    texts = ["<think>a, b</think> <answer>c</answer>", "<think>a</think> b, c"]
    assert ifeval(texts, ground_truth=[truth] * 2) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("punctuation:no_such", {}),
        ("keywords:existence", {}),
        ("keywords:existence", {"keywords": "mom"}),
        ("keywords:existence", {"keywords": [""]}),
        ("keywords:letter_frequency",
         {"letter": "ab", "let_frequency": 1, "let_relation": "at least"}),
        ("keywords:frequency", {"keyword": "a", "frequency": 1, "relation": "about"}),
        ("keywords:frequency", {"keyword": "a", "frequency": "x", "relation": "at least"}),
        ("language:response_language", {"language": "tlh"}),
        ("length_constraints:nth_paragraph_first_word",
         {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"}),
        ("detectable_content:postscript", {"postscript_marker": "..."}),
        ("combination:repeat_prompt", {"prompt_to_repeat": " "}),
        ("punctuation:no_comma", {"num_words": 3}),
    ],
)  # fmt: skip
def test_unusable_instructions_are_errors(kind: str, given: dict[str, object]) -> None:
    truth = {"instruction_id_list": [kind], "kwargs": [given]}
    with pytest.raises(RewardError, match="verifier ifeval"):
        ifeval(["some text"], ground_truth=[truth])


@pytest.mark.parametrize(
    "truth",
    ["no json", {}, {"instruction_id_list": []},
     {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}],
)  # fmt: skip
def test_unusable_truths_are_errors(truth: object) -> None:
    with pytest.raises(RewardError, match="verifier ifeval"):
        ifeval(["a"], ground_truth=[truth])
    with pytest.raises(ConfigError, match="score"):
        ConstraintVerifier(score="some")  # type: ignore[arg-type]

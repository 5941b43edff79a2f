# ruff: noqa: RUF001  (letters of many scripts)
"""Language detection by script, then by the most common words.

Accurate enough to check an instruction to answer in a language; not a general detector.
"""

from __future__ import annotations

import re
from collections import Counter

MAX_LETTERS = 20_000  # read from a text
SHARE = 0.5  # of the letters that must be in the script of the language

_SCRIPTS = {
    "latin": ((0x41, 0x5A), (0x61, 0x7A), (0xC0, 0x24F), (0x1E00, 0x1EFF)),
    "greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "cyrillic": ((0x400, 0x52F),),
    "armenian": ((0x530, 0x58F),),
    "hebrew": ((0x590, 0x5FF),),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0xFB50, 0xFDFF), (0xFE70, 0xFEFF)),
    "devanagari": ((0x900, 0x97F),),
    "bengali": ((0x980, 0x9FF),),
    "gurmukhi": ((0xA00, 0xA7F),),
    "gujarati": ((0xA80, 0xAFF),),
    "tamil": ((0xB80, 0xBFF),),
    "telugu": ((0xC00, 0xC7F),),
    "kannada": ((0xC80, 0xCFF),),
    "malayalam": ((0xD00, 0xD7F),),
    "thai": ((0xE00, 0xE7F),),
    "georgian": ((0x10A0, 0x10FF),),
    "hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xAC00, 0xD7AF)),
    "kana": ((0x3040, 0x30FF),),
    "han": ((0x3400, 0x4DBF), (0x4E00, 0x9FFF)),
}
_ALONE = {
    "greek": "el", "armenian": "hy", "hebrew": "he", "bengali": "bn", "gurmukhi": "pa",
    "gujarati": "gu", "tamil": "ta", "telugu": "te", "kannada": "kn", "malayalam": "ml",
    "thai": "th", "georgian": "ka", "hangul": "ko", "kana": "ja", "han": "zh",
}  # fmt: skip
_WORDS = {
    "latin": {
        "en": "the of and to in is that it for was with as you are be this have on not or at by "
        "i from we they his her an but which my will can your would there their what all a very "
        "has had were do does did if so no out up just some them then than into other has when who",
        "de": "der die das und ist nicht ein eine zu den von mit sie ich es auf für im dem des "
        "sich auch an werden als wie wir aus oder wird aber einen sind ihr war bei nach",
        "fr": "le la les et des est un une du en que qui dans pour pas il ce sur plus au nous "
        "vous avec sont par je ne se elle mais ou son être cette aux leur c'est",
        "es": "el la los las y que en un una del es por con para no se lo su como más pero al "
        "sus le ya o este sí porque esta entre cuando muy sin sobre también está",
        "it": "il la che e di un una per non è con del della sono i le si da come gli nel lo ma "
        "anche più al questo ha alla mi dei delle ci o se io",
        "pt": "o a os as e que de um uma não em do da para com é por mais se na no dos das como "
        "mas ao ele foi seu sua ou quando muito nos já eu também só pelo são",
        "nl": "de het een en van is dat niet in te op voor met zijn die er aan ook als maar om "
        "dan wij ik je naar bij uit heeft deze worden",
        "sv": "och att det som är en på inte för med den av ett till han i var jag om men har "
        "vi så från eller kan du",
        "da": "meget noget blev hvad mig "
        "og at det er en på ikke til som med af de der den jeg et har om vi men kan sig "
        "også skal eller når efter",
        "no": "veldig noe ble hva meg "
        "og å det er en på ikke til som med av de den jeg et har om vi men kan seg også "
        "skal eller når etter",
        "fi": "on ja ei se että hän oli mutta ovat tämä joka myös kun niin kuin voi ole minä "
        "olen mitä sen ne sekä jos vain tai hyvin minun olla",
        "vi": "là và của có không được cho một các trong với người này những để khi đã tôi bạn "
        "đó như nhiều về từ ra rất sẽ cũng hơn",
        "sw": "na ya wa kwa ni katika la za kama hii cha kuwa au si yake lakini pia hiyo huo "
        "sana yako wao mimi watu vya kwamba ili bila",
        "tr": "ve bir bu için ile da de çok daha ne gibi olarak ben o en var olan kadar değil "
        "ama",
        "pl": "i w na z się nie jest do to że jak o co po ale za od czy tak dla jego są być",
        "id": "dan yang di ini itu dengan untuk tidak dari dalam akan pada adalah saya ke juga "
        "kami atau bisa mereka anda",
        "ro": "și de în a la cu este nu o un pe pentru din mai ce care sunt dar să se că au fi",
        "cs": "a se v na je že s z do o to i jako ale pro jsou by za od které jsem být",
        "hu": "a az és hogy nem is egy ez van meg de csak ha mint volt vagy el már minden azt",
    },
    "cyrillic": {
        "ru": "и в не на что это с как по но из у я он за то все так его для от мы вы они или "
        "быть",
        "bg": "и на да се от за не с е са в по като че това ще към или бъде която който при има",
        "uk": "і в не на що це з як та до у я він за але його для від ми ви вони або бути є",
    },
    "arabic": {
        "ar": "في من على إلى أن هذا هذه التي الذي مع كان لا ما عن هو هي أو كل ذلك بعد و قد كما",
        "fa": "و در به از که این را با است برای آن یک خود تا بر هم می‌شود شما ما من او هر می "
        "نیست اگر",
        "ur": "کے کی میں ہے اور سے کا کو پر ہیں نے یہ کہ اس ایک بھی تھا ہو کر نہیں آپ لیے وہ ہم",
    },
    "devanagari": {
        "hi": "है हैं का की के में और से को यह पर एक ने नहीं भी कि हो था लिए तो ही इस आप हम मैं "
        "जो कर",
        "mr": "आहे आहेत आणि हा ही हे मी तो ती ते या नाही एक होते होता काय तुम्ही आपण मध्ये केले "
        "आम्ही साठी पण च्या ला करा की किंवा",
        "ne": "छ छन् हो र मा लाई पनि गर्न यो त्यो हुन्छ भएको को छैन तपाईं हामी गरेको लागि यस म "
        "थियो छौं गर्नुहोस् गर्छ तर एक",
    },
}  # fmt: skip
_LETTERS = {  # rare in the other languages of the script
    "vi": "ăđơưạảấầẩẫậắằẳẵặẹẻẽếềểễệỉịọỏốồổỗộớờởỡợụủứừửữựỳỵỷỹ",
    "de": "ßäöü", "fi": "äö", "sv": "åäö",
    "da": "æø", "no": "æø", "fr": "çœêèàù", "es": "ñ¿¡", "pt": "ãõç", "tr": "ğışç", "pl": "ąęłśżźć",
    "ro": "șțăâ", "cs": "ěřůžš", "hu": "őű", "ru": "ыэё", "uk": "іїєґ", "bg": "ъ", "mr": "ळ",
    "ur": "ٹڈڑںےہھ", "fa": "پچژگکی", "ar": "ةىيكأإ",
}  # fmt: skip
_WORD_LISTS = {
    script: {code: frozenset(text.split()) for code, text in lists.items()}
    for script, lists in _WORDS.items()
}
_SCRIPT_OF = {code: script for script, code in _ALONE.items()} | {
    code: script for script, lists in _WORDS.items() for code in lists
}
KNOWN = frozenset(_SCRIPT_OF)
_TOKEN = re.compile(r"[^\s\d.,;:!?()\[\]{}\"“”«»*_#/|<>।؟،…—–-]+")


def detect_language(text: str) -> str | None:
    """The two-letter code of the language, or None if the text is too short or mixed."""
    text = text[:MAX_LETTERS].casefold()
    scripts = Counter(_script(ord(letter)) for letter in text if letter.isalpha())
    total = sum(scripts.values())
    if not total:
        return None
    if scripts["kana"] and scripts["kana"] + scripts["han"] > SHARE * total:
        return "ja"
    script, count = scripts.most_common(1)[0]
    if count <= SHARE * total:
        return None
    return _ALONE.get(script) or _by_words(text, script)


def written_in(text: str, code: str) -> bool:
    """Whether a text is written in a language.

    Args:
        text: the text.
        code: one of ``KNOWN``.
    """
    return detect_language(text) == code


def _by_words(text: str, script: str) -> str | None:
    lists = _WORD_LISTS.get(script)
    if lists is None:
        return None
    words = Counter(_TOKEN.findall(text))
    letters = Counter(text)
    scores = {code: 0.0 for code in lists}
    for code, known in lists.items():
        scores[code] += sum(count for word, count in words.items() if word in known)
        scores[code] += 0.5 * sum(letters[letter] for letter in _LETTERS.get(code, ""))
    (first, most), (_, second) = sorted(scores.items(), key=lambda item: -item[1])[:2]
    return first if most > second else None


def _script(point: int) -> str:
    for name, ranges in _SCRIPTS.items():
        if any(low <= point <= high for low, high in ranges):
            return name
    return "other"

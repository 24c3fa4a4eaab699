# ruff: noqa: RUF001
"""Which encoding a text without a mark has: the one whose result looks most like a language.

The characters of each language beyond ASCII are listed, the most frequent ones first. Each of them
counts the more, the more frequent it is. A symbol after a letter, a capital after a small letter,
and a character of another language count as errors.
"""

import re
from contextlib import suppress
from math import log

WEST = {
    "German": "üäößÄÜÖéẞ",
    "French": "éèàêçîùôâûœëïÉÀÇÈÊÔŒ",
    "Spanish": "óíáéñúüÁÉÓÍÑÚªº",
    "Portuguese": "ãçáéóíêõàâúôüÁÉÍÓÃÇÚªº",
    "Italian": "èàùìòéÈÀÙ",
    "Scandinavian": "äåöøæéÅÄÖØÆüô",
    "Dutch": "éëïèêöüáóÉ",
    "Icelandic": "áíðéóöúæþýÁÍÐÉÓÖÚÆÞÝ",
    "Finnish": "äöÄÖåéšžÅ",
    "Catalan": "àóéèíòçúïüÀÓÉÈÍÒÇ",
}
CENTRAL = {
    "Polish": "łąężóśćńźŁŻŚĆÓŹĄĘŃ",
    "Czech": "íáéěřčšžýůúťňďóŘČŠŽÍÁÚÉĎŤŇÝŮÓ",
    "Slovak": "áíéčýžšúľťňôóďäŕĺČŽŠÁÍÚĽÉÝŤŇĎÓ",
    "Hungarian": "áéöóőíüúűÁÉÖÓŐÍÜÚŰ",
    "Romanian": "ăîțâșşţŞŢÎĂÂȘȚ",
    "Croatian": "čćžšđŽČŠĆĐ",
    "German": "üäößÄÜÖé",
}
CYRILLIC = {
    "Russian": "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъёПСВНОКМТРДАБИГЗЕУЛЯЭФХЧШЮЖЦЩЁЙ№",
    "Ukrainian": "оаниівтреслкмдупязьгбчйхцжїєюшщфґПСВНОКМТРДАБІГЗЕУЛЯЄФХЧШЮЖЦЩЇЙИ№",
    "Bulgarian": "аоиетнрсвлкдпмзябъгучщжцйхшфюьПСВНОКМТРДАБИГЗЕУЛЯФХЧШЮЖЦЩЙЪ№",
}
GREEK = {"Greek": "αοιετνσηρπκμλςυόίάέγδήύχθφώβξζψϊΑΤΠΚΕΟΜΣΗΔΝΛΓΙΡΧΒΘΦΥΈΆΌΖΞΏΉΊΨ"}
# Where a language has thousands of characters, the most frequent ones, and those that are common.
JAPANESE = (
    "のいはたにをとてがでしかなれるさっもこすまりらんくあきう、。ーンスイトルラリアクドシレ「」"
)
CHINESE = (
    "的一是不了在人有我他这中大来上们到说国和要以会就你好很，。！？、：；（）"
    "這們來說國會差服务态度天"
)
KOREAN = "이다는에의을가고한지하나사기도로어들자은그서리인해아대시수를있정"
EAST = {
    "cp932": (JAPANESE, "[ぁ-んァ-ヶー一-鿿！-～]", "cp932"),
    "euc_jp": (JAPANESE, "[ぁ-んァ-ヶー一-鿿！-～]", "euc_jp"),
    "gb18030": (CHINESE, "[一-鿿！-～]", "gb2312"),
    "big5": (CHINESE, "[一-鿿！-～]", "big5"),
    "cp949": (KOREAN, "[가-힣]", "euc_kr"),
}
ALPHABETS = {
    "cp1252": WEST,
    "cp1250": CENTRAL,
    "iso8859_2": CENTRAL,
    "cp1251": CYRILLIC,
    "koi8_r": CYRILLIC,
    "koi8_u": CYRILLIC,
    "cp866": CYRILLIC,
    "mac_cyrillic": CYRILLIC,
    "iso8859_5": CYRILLIC,
    "cp1253": GREEK,
    "cp1254": {"Turkish": "ıişğüçöâİŞÇÖÜĞÂ"},
    "cp1257": {
        "Lithuanian": "ėšžąįųūęčŠŽĖČĮŲŪ",
        "Latvian": "āīēšūļņģķčžĀĪĒŠŪĻŅĢĶČŽ",
        "Estonian": "äõüöšžÄÕÜÖŠŽ",
    },
    "cp1255": {"Hebrew": "יוהלאמרתבשנעחדקפצגטכסזםןךףץ"},
    "cp1256": {"Arabic": "الينمرتوبعدسفهكقحجةشطصخأذضىءثئغإآزظؤ،؟ًپچگژ"},
    "cp874": {"Thai": "านรอกเงมลทวยสดตปะคบีิใ่้ไ็ัขหจพชโผถซูุื์แำฟญณธฐศษึ"},
    "mac_roman": WEST,
    "mac_latin2": CENTRAL,
    "cp852": {name: CENTRAL[name] for name in ("Polish", "Czech", "Hungarian")},
    "cp850": WEST,
    "latin_1": WEST,
}
# What texts of all languages have between words.
PUNCTUATION = frozenset("–—‘’‚“”„…«»‹›•·€£§°©®™¿¡²³½¼\u00a0")
AFTER_LETTER = re.compile(
    r"(?<=[^\W\d_])[^\w\s'’\-./,:;!?()\[\]{}<>%#&*|\"«»“”„‘–—…@+=\u00a0。、，！？\x00-\x7f]|[”»](?=[^\W\d_])"
)
TWO_SCRIPTS = re.compile("[a-zA-Z][\u0370-\u052f]|[\u0370-\u052f][a-zA-Z]")
CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f]")
CAPITAL = re.compile(r"(?<=[a-z])[^\W\d_a-zA-Z]")
# The likely ones first; each one is a little less likely than the one before it.
ENCODINGS = (
    *("cp1252", "cp1250", "cp1251", "cp932", "gb18030", "cp949", "big5", "cp1253", "cp1254"),
    *("cp1255", "cp1256", "cp874", "mac_roman", "koi8_r", "cp1257", "euc_jp", "iso8859_2"),
    *("latin_1", "cp866", "mac_latin2", "mac_cyrillic", "cp850", "cp852", "koi8_u", "iso8859_5"),
)
LESS_LIKELY = 0.1
ERROR, COMMON_EAST, MARK = log(1e-6), log(5e-4), log(0.02)


def detect_encoding(sample: bytes) -> str | None:
    """Return the encoding that makes most sense of some bytes, or ``None`` if none reads them.

    >>> detect_encoding("Zażółć gęślą jaźń".encode("cp1250"))
    'cp1250'
    """
    if CONTROL.search(sample):
        return None
    scores = {}
    for place, encoding in enumerate(ENCODINGS):
        with suppress(UnicodeError):
            text = sample.decode(encoding)
            if encoding in EAST:
                score = _score_east(text, *EAST[encoding])
            else:
                score = max(_score(text, own) for own in ALPHABETS[encoding].values())
            scores[encoding] = score - LESS_LIKELY * place
    return max(scores, key=scores.__getitem__, default=None)


def _score(text: str, letters: str) -> float:
    ranks = {letter: log(0.5 / (rank + 1)) for rank, letter in enumerate(letters)}
    errors = sum(len(wrong.findall(text)) for wrong in (AFTER_LETTER, TWO_SCRIPTS))
    errors += sum(map(str.isupper, CAPITAL.findall(text)))
    total = errors * (ERROR - MARK)
    for character in set(text):
        if character > "\x7f":
            mark = MARK if character in PUNCTUATION else ERROR
            total += text.count(character) * ranks.get(character, mark)
    return total


def _score_east(text: str, frequent: str, common: str, codec: str) -> float:
    is_common = re.compile(common)
    total = 0.0
    for character in set(text):
        if character <= "\x7f":
            continue
        count = text.count(character)
        if character in frequent:
            total += count * log(0.2 / (frequent.index(character) + 5))
        elif is_common.match(character) and len(character.encode(codec, errors="ignore")) == 2:
            total += count * COMMON_EAST
        else:
            total += count * (MARK if character in PUNCTUATION | {"\u3000"} else ERROR)
    return total

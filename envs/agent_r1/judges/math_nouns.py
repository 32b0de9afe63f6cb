r"""Classification of words after a number: nouns that only name what is counted (`12 books`), and words that change the
number (`12 dozen`).

No list of number-changing words is complete. So they are matched by their stems, in several languages, and a word is a
noun only if it looks like one. With a question the noun must also be known: from the question, as a plain unit, or as
an English plural.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

LATIN = "[A-Za-zÀ-ÖØ-öø-ÿ]+"
MOST_WORDS = 3  # square meters per, square inches, km / h
# Words that deny, join or change a number; none of them names the requested quantity, either.
NO_NOUNS = frozenset(
    "or and not is but maybe either neither nor no non if unless else otherwise than versus vs perhaps possibly "
    "probably alternatively instead rather also except without equals wrong false incorrect never excluded rejected "
    "anything plus minus times to ou oder "
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion "
    "dozen half halves third thirds quarter quarters tenth tenths hundredth hundredths thousandth thousandths lakh "
    "crore score gross negative least most squared cubed twice "
    "ten hundreds more less fewer off short about under over below above factorial inverse reciprocal root infinity "
    "infinite modulo mod choose power exponent".split()
)
# Words that may be a name but change a number after it. The last rows are French, German, Italian, Portuguese, Spanish.
_CHANGERS = frozenset(
    "nothing none hardly scarcely barely supposedly isn aren wasn doesn cannot thrice once few many much several too "
    "so very between within until past approximately roughly around almost nearly circa greater larger smaller higher "
    "lower bigger upto opposite complement conjugate absolute maximum minimum double triple treble pair couple duo "
    "trio quartet grand thou mill mil first zeroth nth last fold manifold nil null naught nought undefined unknown "
    "quotient remainder fraction numerator denominator binary octal hexadecimal basis sine cosine tangent "
    "logarithm ppm ppb alpha beta gamma delta epsilon theta lambda varphi omega sigma sqrt arcsin arccos arctan mille "
    "percentile kilo mega giga tera peta exa milli micro nano pico femto centi deci deca hecto "
    "et demi demie deux trois quatre cinq onze douze treize quinze seize vingt trente quarante cinquante soixante "
    "douzaine centaine millier moitie tiers virgule fois und con medio media mezzo mezza meia meio eins zwei drei vier "
    "zehn zwolf komma uno dos tres cuatro cinco seis siete ocho nueve diez cien ciento docena dozzina duzia due "
    "quattro cinque sei sette otto nove dieci tre dois duas quatro sete oito dez mila cento".split()
)
_NUMBER_WORD = (
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"
    "eighteen|nineteen|twenty|thirty|forty|fourty|fifty|sixty|seventy|eighty|ninety|hundred|thousand|dozen|half|and|"
    "(?:for|four|fi[fv]?e?|six|seven|eigh?t?|nine?|ten|eleven|twel[fv]?e?|[a-z]{2,5}teen|hundred|thousan?d?|zero|"
    "(?:twen|thir|four?|fif|six|seven|eigh?|nine?)tie)t?h|(?:twen|thir|four?|fif|six|seven|eigh?|nine?)tie|"
    "first|third|quarter|fold"
)
_CHANGES = re.compile(
    rf"(?:{_NUMBER_WORD})+s?"
    r"|[a-z]*(?:illi(?:on|ard)|mili(?:on|ard|ao)|millon|milho|googol|myriad|teenth)[a-z]{0,4}"
    r"|[a-z]*(?:hundert|tausend|dutzend|zehntel|zigstel|hundertstel)[a-z]{0,3}|(?:drit|vier|funf|sechs|sieb|ach|neun)tel"
    r"|(?:zwan|drei|vier|funf|sech|sieb|acht|neun)[sz]ig|(?:andert|ein)?halb[a-z]{0,2}|halfte|[a-z]{3,7}zehn"
    r"|(?:re|un|non)?(?:doubl(?!oon)|tripl|trebl|(?:quadr|quint|sext|sept|oct|dec|cent)upl|verdoppel|halv|halb|half|"
    r"multipl(?!ex)|divid(?!en)|divis(?!ion)|subtract|negat|recur|repeat|periodic(?!al)|imagin|invers|invert|recipro|"
    r"factori|exponen|infinit|approx|estimat|increas|decreas|reduc|permil|promil|percent|dozen|decimat|rais(?!in)|round(?!s)|"
    r"add(?!r)|normali|conjug|squared|cubed|incorrect|wrong|invalid|mistak(?!es))[a-z]*"
)
# Words of up to three letters may be a product of letters: only these are units. Others are known for certain.
_UNITS = frozenset(
    "cent dollar euro pound rupee peso yen usd us eur gbp people men man women woman child children feet foot inch ft "
    "in yd yard mi mile mm cm dm km kg mg lb lbs oz ml gal pt qt quart sec min hr hrs day days mph kph kmh rpm unit sq "
    "square cubic per of the degree year yr yrs hour minute second week month mice fish geese teeth sheep deer "
    "meter metre liter litre gram kilogram kilometer centimeter millimeter celsius fahrenheit radian each in all left "
    "total altogether red blue green yellow black white brown pink old new big small large positive cat cats dog dogs "
    "cow cows pig pigs hen hens egg eggs cup cups pen pens box boxes bag bags car cars hat hats pie pies toy toys "
    "boy boys girl ton tons way ways men kid kids can cans jar jars bus key keys ant ants person game time book ball "
    "page coin apple student point ticket ice fruit money them american canadian".split()
)
_UNKNOWNS = frozenset("abcdmnpqrtuvwxyz")  # letters that people use for unknowns


def changes_number(word: str) -> bool:
    """Return whether a word, in small letters, changes the number before it, or may: `fifths`, `doubled`, `nearly`."""
    word = _plain(word)
    return not (NO_NOUNS | _CHANGERS).isdisjoint(_stems(word)) or bool(_CHANGES.fullmatch(word))


def is_noun(words: str, question: str = "") -> bool:
    """Return whether words can only be a noun and its attributes; a question may make them known."""
    parts = re.findall(LATIN, _plain(words))
    joined = {"".join(parts), *map("".join, zip(parts, parts[1:], strict=False))}  # hund red
    if not 0 < len(parts) <= MOST_WORDS or any(map(changes_number, {*parts, *joined})):
        return False
    asked = _asked(question)
    return max(map(len, parts)) > 2 and all(
        not asked.isdisjoint(_stems(word))
        or _looks_like_noun(word, strict=bool(question) and "of" not in parts[:place])
        for place, word in enumerate(parts)
    )


def _looks_like_noun(word: str, strict: bool) -> bool:
    """Return whether a word is a unit or looks like a noun; with `strict` only a unit or a plural."""
    if word in _UNITS or not _UNITS.isdisjoint(_stems(word) if len(word) > 3 else ()):
        return True
    is_plural = word.endswith("s")
    is_product = _UNKNOWNS.issuperset(word) and (len(word) == 4 or not set("wxyz").isdisjoint(word[:-1]))
    if len(word) < 4 or set("aeiouy").isdisjoint(word) or not is_plural and is_product:
        return False
    return is_plural or not strict and not (len(word) == 4 and list(word) == sorted(set(word)))  # efgh


def _plain(text: str) -> str:
    """Return the text in small letters without accents."""
    text = unicodedata.normalize("NFKD", text.lower())
    return "".join(character for character in text if not unicodedata.combining(character))


def _stems(word: str) -> set[str]:
    """Return a word and its possible singulars."""
    stems = {word, word.removesuffix("s"), re.sub("ies$", "y", word), re.sub("ves$", "f", word)}
    return stems | {re.sub("(s|x|z|ch|sh)es$", r"\1", word)}


@lru_cache(maxsize=1024)
def _asked(question: str) -> frozenset[str]:
    """Return the words of a question with their singulars, without its formulas."""
    text = re.sub(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]|\\[a-zA-Z]+", " ", question)
    words = [_plain(word) for word in re.findall(LATIN, text) if not word.isupper()]
    return frozenset(stem for word in words if set("aeiouy") & set(word) for stem in _stems(word) if len(stem) > 1)

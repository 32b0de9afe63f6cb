"""Search and lookup in any script and any spelling of Unicode."""

import time
import unicodedata

import pytest

from agent_r1_tools import LookupTool, run_tool
from agent_r1_tools.search import BM25Retriever, Passage, SearchTool
from agent_r1_tools.search.words import all_words, fold, fold_title, words

pytest.importorskip("bm25s")


def found(passages, query, top_k=3):
    ((*hits,),) = BM25Retriever([Passage(*one) for one in passages]).search([query], top_k)
    return [passage.title for passage, _ in hits]


def passages(*texts):
    return [(text.split()[0] if " " in text else text[:2], text) for text in texts]


LANGUAGES = [
    ("北京是中国的首都。", "巴黎是法国的首都。", "法国"),
    ("北京是中国的首都。", "巴黎是法国的首都。", "法国的首都是什么？"),
    ("北京是中國的首都。", "貓喜歡魚。", "貓"),
    ("小猫喜欢吃鱼。", "大狗喜欢吃肉。", "狗"),
    ("東京は日本の首都です。", "パリはフランスの首都です。", "フランス"),
    ("東京は日本の首都です。", "パリはフランスの首都です。", "フランスの首都はどこですか"),
    ("水は液体です。", "火は熱いです。", "火とは何ですか"),
    ("กรุงเทพเป็นเมืองหลวงของไทย", "ปารีสเป็นเมืองหลวงของฝรั่งเศส", "ฝรั่งเศส"),
    ("दिल्ली भारत की राजधानी है।", "पेरिस फ्रांस की राजधानी है।", "फ्रांस की राजधानी"),
    ("서울은 대한민국의 수도이다.", "파리는 프랑스의 수도이다.", "프랑스 수도"),
    ("القاهرة عاصمة مصر.", "باريس عاصمة فرنسا.", "عاصمة فرنسا"),
    ("ירושלים בירת ישראל.", "פריז בירת צרפת.", "בירת צרפת"),
    ("Η Αθήνα είναι πρωτεύουσα της Ελλάδας.", "Ο Όμηρος ήταν ποιητής.", "όμηροσ"),
    ("Hà Nội là thủ đô của Việt Nam.", "Paris là thủ đô của Pháp.", "pháp"),
    ("ພາສາລາວ", "ປາຣີແມ່ນນະຄອນ", "ປາຣີ"),
    ("ភ្នំពេញ", "ប៉ារីសជារដ្ឋធានី", "ប៉ារីស"),
    ("ရန်ကုန်မြို့", "ပါရီမြို့တော်", "ပါရီ"),
    ("தமிழ் ஒரு மொழி", "பாரிஸ் ஒரு நகரம்", "பாரிஸ்"),
    ("Київ є столицею України.", "Париж є столицею Франції.", "СТОЛИЦЕЮ ФРАНЦІЇ"),
    ("Apple makes computers.", "苹果公司生产iPhone手机。", "iphone"),
    ("An article on tea.", "A recipe for 🍕 and salad.", "🍕"),
]


@pytest.mark.parametrize(("other", "wanted", "query"), LANGUAGES)
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_bm25_finds_words_in_any_script(other, wanted, query, form):
    texts = [unicodedata.normalize(form, text) for text in (other, wanted)]
    for asked in (query, unicodedata.normalize("NFD", query), query.upper()):
        hits = found([("one", texts[0]), ("two", texts[1])], asked)
        assert hits[:1] == ["two"], (asked, hits)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Café Tortoni", "Cafe\u0301 Tortoni"),
        ("Việt Nam", unicodedata.normalize("NFD", "Việt Nam")),
        ("Việt Nam", "Vie\u0302\u0323t Nam"),  # the marks in another order
        ("한국어", unicodedata.normalize("NFD", "한국어")),
        ("ガイド", "ｶﾞｲﾄﾞ"),
        ("Ａｐｐｌｅ　１２３", "apple 123"),
        ("Straße", "STRASSE"),
        ("GROẞ ORT", "groß ort"),
        ("Οδυσσέας Ελύτης", "ΟΔΥΣΣΈΑΣ ΕΛΎΤΗΣ"),
        ("ﬁlm oﬃce", "film office"),
        ("co\u00adoperate", "cooperate"),
        ("مُحَمَّد", "محمد"),
        ("محـــمد", "محمد"),
        ("שָׁלוֹם", "שלום"),
        ("ﻣﺤﻤﺪ", "محمد"),
        ("می\u200cخواهم", "میخواهم"),
        ("İstanbul", "istanbul"),
        ("𝐇𝐞𝐥𝐥𝐨 world", "hello world"),
        ("٣٤ ٥٦", "34 56"),
        ("१२ ३४", "12 34"),
        ("Ⅷ Kings", "viii kings"),
        ("क़लम", unicodedata.normalize("NFD", "क़लम")),
        ("❤\ufe0f heart", "❤ heart"),
        ("\u202bשלום\u202c", "שלום"),
    ],
)
def test_two_spellings_of_the_same_meet(one, other):
    for title, asked in ((one, other), (other, one)):
        lookup = LookupTool([Passage(title, "text"), Passage("Other", "nothing")])
        assert run_tool(lookup, {"title": asked}).ok, (title, asked)
        assert found([("a", f"It is {title} indeed"), ("b", "Nothing else")], asked)[:1] == ["a"]
        assert found([(title, "indeed"), ("Other", "nothing")], asked)[:1] == [title]


@pytest.mark.parametrize(
    ("one", "other"),
    [("resume", "résumé"), ("Köln", "Koln"), ("Ångström", "Angstrom"), ("か", "が"), ("北京", "南京"), ("ё", "е")],
)
def test_different_words_stay_different(one, other):
    assert fold_title(one) != fold_title(other)
    assert not run_tool(LookupTool([Passage(one, "text")]), {"title": other}).ok


@pytest.mark.parametrize("title", ["Q", "x", "7", "É", "Я", "ß", "龙", "水", "ก", "Ω", "あ", "金", "🍕", "Ｑ"])
def test_a_title_of_one_character_is_found(title):
    texts = [("Alphabet", "Letters and numbers."), (title, "A thing with a short name."), ("B", "Another letter.")]
    decomposed = unicodedata.normalize("NFD", title)
    for query in (title, f"{title}?", f"What is {title}", title.upper(), title.lower(), decomposed):
        assert title in found(texts, query), query
    assert run_tool(LookupTool([Passage(*one) for one in texts]), {"title": title.lower()}).ok


def test_a_letter_inside_of_a_text_is_no_word():
    texts = [("Robert F. Kennedy", "A politician. It's F. K."), ("F", "A letter."), ("Kennedy", "A family.")]
    assert found(texts, "Robert F. Kennedy") == ["Robert F. Kennedy", "Kennedy"]
    assert found(texts, "s t") == []


@pytest.mark.parametrize("query", ["", " ", "。", "的", "は", "\u0301", "\u200b", "🦄", "鮪", "\ud800", "\0", "ﷺ", "़"])
def test_a_query_that_shares_nothing_finds_nothing(query):
    assert found([("北京", "北京是中国的首都。"), ("Paris", "Paris is in France."), ("दिल्ली", "भारत")], query) == []


def test_english_is_read_as_before():
    text = "The U.S. team's café-bar, e.g. 3D_model no. 42: naïve coöperation in São Paulo (東京) – 5½ m² İzmir"
    assert all_words(text) == [
        "the", "team", "café", "bar", "3d_model", "no", "42", "naïve", "coöperation", "in", "são", "paulo", "東京",
        "5½", "m²", "izmir",
    ]  # fmt: skip
    plain, others = words(text)
    assert plain == [word for word in all_words(text) if word != "東京"] and others == ["東京"]


def test_names_in_other_scripts_change_no_score_of_an_english_query():
    def scores(name):
        texts = [f"Jin Jing {name} is a fencer from China", "Beijing is the capital of China", "A fencer fences"]
        hits = BM25Retriever([Passage(text[:3], text) for text in texts]).search(["a fencer from China"], 3)[0]
        return [(passage.title, score) for passage, score in hits]

    assert scores("(xx)") == scores("(金晶)") == scores("(金晶金晶金晶)") == scores("(เป็น)")


def test_any_text_is_read_in_time_that_grows_with_its_length():
    pieces = ("的", "一", "ก", "é", "e\u0301", "a\u0301\u0302\u0303", "ﷺ", "가", "\u1100\u1161", "🍕", "\u00ad", "ｶﾞ")
    for piece in pieces:
        start = time.process_time()
        words(piece * (100_000 // len(piece)), inside=True)
        assert time.process_time() - start < 2
    assert fold("a" + "\u0301" * 50_000)
    assert len(words("一" * 2048)[1]) == 2047


def test_a_retriever_is_asked_in_composed_letters():
    class Notes:
        timeout = 1.0
        asked: list[str] = []

        def search(self, queries, top_k):
            self.asked += queries
            return [[] for _ in queries]

    run_tool(SearchTool(Notes()), {"query": "Cafe\u0301 한"})
    assert Notes.asked == ["Café 한"]


def test_suggestions_in_a_large_corpus():
    titles = [f"东方之{chr(0x4E00 + n)}珠" for n in range(300)] + ["Cafe\u0301 Tortoni", "Q"]
    lookup = LookupTool([Passage(title, "text") for title in titles])
    suggestions = run_tool(lookup, {"title": "Café Torton"}).data["suggestions"]
    assert suggestions == [] or "Cafe\u0301 Tortoni" in suggestions
    assert run_tool(lookup, {"title": "东方之珠"}).data["suggestions"]


def test_a_letter_with_too_many_marks_is_read_in_time():
    """Composing takes the square of their number: 12 s for these."""
    begun = time.process_time()
    folded = fold("a" + "\u0316\u0301" * 50_000)
    assert time.process_time() - begun < 2 and len(folded) < 40
    assert fold("e" + "\u0301" * 30) == fold("e" + "\u0301" * 40)

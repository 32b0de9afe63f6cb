"""Scripts for MiniWoB's tasks: each reads the instruction and the page, and yields the calls to make."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from agent_r1.bridges.miniwob.elements import Element

Calls = Iterator[tuple[str, dict[str, Any]]]
Script = Callable[[str, list[Element]], Calls]


def click(element: Element) -> tuple[str, dict[str, Any]]:
    return "click", {"element": element.ref}


def fill(element: Element, text: str) -> tuple[str, dict[str, Any]]:
    return "type", {"element": element.ref, "text": text}


def named(page: list[Element], text: str, *tags: str) -> Element:
    """Return the first element with a text, with one of the tags, if any are given."""
    return next(one for one in page if one.text == text and one.ref is not None and (not tags or one.tag in tags))


def fields(page: list[Element]) -> list[Element]:
    """Return the elements for typing."""
    return [one for one in page if one.tag in ("input_text", "input_password", "textarea")]


def submit(page: list[Element]) -> tuple[str, dict[str, Any]]:
    """Click the last button of the page, which ends most tasks."""
    return click([one for one in page if one.tag == "button"][-1])


def quoted(asked: str) -> list[str]:
    """Return the texts in quotation marks."""
    return re.findall(r'"([^"]*)"', asked)


def boxes(page: list[Element]) -> dict[str, Element]:
    """Return check boxes and radio buttons by the word after each."""
    pairs = zip(page, page[1:], strict=False)
    return {after.text: one for one, after in pairs if one.tag in ("input_checkbox", "input_radio")}


def the_button(asked: str, page: list[Element]) -> Calls:
    """'Click on the "OK" button.'"""
    (text,) = quoted(asked) or ["Click Me!"]
    yield click(named(page, text, "button"))


def only_button(asked: str, page: list[Element]) -> Calls:
    yield submit(page)


def both_buttons(asked: str, page: list[Element]) -> Calls:
    yield click(named(page, "ONE"))
    yield click(named(page, "TWO"))


def button_one(asked: str, page: list[Element]) -> Calls:
    (text,) = re.findall(r"button (\w+)", asked)
    yield click(named(page, text, "button"))


def the_link(asked: str, page: list[Element]) -> Calls:
    (text,) = quoted(asked)
    yield click(named(page, text, "span"))


def the_boxes(asked: str, page: list[Element]) -> Calls:
    """'Select a, b and click Submit.'"""
    (wanted,) = re.findall(r"^Select (.*) and click Submit\.$", asked)
    for word in wanted.split(", ") if wanted != "nothing" else []:
        yield click(boxes(page)[word])
    yield submit(page)


def close_dialog(asked: str, page: list[Element]) -> Calls:
    yield click(next(one for one in page if "Close" in (one.text,) or "closethick" in one.classes or one.text == ""
                     and one.tag == "button"))  # fmt: skip


def dialog_button(asked: str, page: list[Element]) -> Calls:
    (text,) = quoted(asked)
    if text == "x":
        yield from close_dialog(asked, page)
    else:
        yield click(named(page, text, "button"))


def the_tab(asked: str, page: list[Element]) -> Calls:
    (number,) = re.findall(r"Tab #(\d)", asked)
    yield click(named(page, f"Tab #{number}", "a"))


def the_widget(asked: str, page: list[Element]) -> Calls:
    (kind,) = quoted(asked)
    tags = {"text": "input_text", "radio": "input_radio", "checkbox": "input_checkbox"}
    yield click(next(one for one in page if one.tag == tags.get(kind, kind)))


def from_list(asked: str, page: list[Element]) -> Calls:
    """'Select Ann, Bea from the scroll list and click Submit.'"""
    (wanted,) = re.findall(r"^Select (.*) from the ", asked)
    one = next(element for element in page if element.tag == "select")
    for option in wanted.split(", "):
        yield "select", {"element": one.ref, "option": option}
    yield submit(page)


def enter(asked: str, page: list[Element]) -> Calls:
    """'Enter "Ann" into the text field and press Submit.', in every field, in the case that is asked for."""
    (text,) = quoted(asked)
    text = text.upper() if "all upper case" in asked else text.lower() if "all lower case" in asked else text
    for one in fields(page):
        yield fill(one, text)
    yield submit(page)


def log_in(asked: str, page: list[Element]) -> Calls:
    for one, text in zip(fields(page), quoted(asked), strict=True):
        yield fill(one, text)
    yield submit(page)


def the_field(asked: str, page: list[Element]) -> Calls:
    (number,) = re.findall(r"(\d)\w\w input", asked) or ["1"]
    yield click(fields(page)[int(number) - 1])


def the_word(asked: str, page: list[Element]) -> Calls:
    (number,) = re.findall(r"the (\d+)\w\w word", asked)
    paragraph = next(one.text for one in page if one.tag == "p")
    yield fill(fields(page)[0], re.sub(r"[^a-zA-Z]", "", paragraph.split()[int(number) - 1]))
    yield submit(page)


def arithmetic(asked: str, page: list[Element]) -> Calls:
    one, sign, two = next(found for element in page if (found := re.findall(r"^(\d) ([-+x]) (\d) =$", element.text)))[0]
    a, b = int(one), int(two)
    yield fill(fields(page)[0], str({"+": a + b, "-": a - b, "x": a * b}[sign]))
    yield submit(page)


def algebra(asked: str, page: list[Element]) -> Calls:
    pattern = r"^(\w+) ([-+]) (\w+) = (\d+)$"
    one, sign, two, result = next(found for element in page if (found := re.findall(pattern, element.text)))[0]
    right, number = int(result), int(two if one == "x" else one)
    x = right - number if sign == "+" else right + number if one == "x" else number - right
    yield fill(fields(page)[0], str(x))
    yield submit(page)


def cells(page: list[Element]) -> dict[str, str]:
    """Return the second column of a table by the first."""
    texts = [one.text for one in page if one.tag == "td"]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def from_table(asked: str, page: list[Element]) -> Calls:
    """'Enter the value of Color into the text field and press Submit.'"""
    (key,) = re.findall(r"value of (.*) into", asked)
    yield fill(fields(page)[0], cells(page)[key])
    yield submit(page)


def labels_from_table(asked: str, page: list[Element]) -> Calls:
    label = ""
    for one in page:
        label = one.text.rstrip(":") if one.text.endswith(":") else label
        if one in fields(page):
            yield fill(one, cells(page)[label])
    yield submit(page)


def letters(asked: str, page: list[Element]) -> Calls:
    yield fill(fields(page)[0], "".join(one.text for one in page if one.tag == "span"))
    yield submit(page)


def odd_or_even(asked: str, page: list[Element]) -> Calls:
    for before, one, after in zip(page, page[1:], page[2:], strict=False):
        if re.fullmatch(r"-?\d+", one.text):
            yield click(before if int(one.text) % 2 else after)
    yield submit(page)


def find_films(asked: str, page: list[Element]) -> Calls:
    """'Search for crime movies directed by Mary from year 1990.'"""
    pattern = r"Search for (.*) movies directed by (.*) from year (\d+)"
    found = dict(zip(("Genre", "Director", "Year"), re.findall(pattern, asked)[0], strict=True))
    for before, one in zip(page, page[1:], strict=False):
        if one.tag == "input_text":
            yield fill(one, found[before.text])
    yield click(named(page, "Submit"))


def delete_mail(asked: str, page: list[Element]) -> Calls:
    """'Find the email by Ann and click the trash icon to delete it.'"""
    (sender,) = re.findall(r"email by (.*) and click", asked)
    start = next(place for place, one in enumerate(page) if one.text == sender)
    yield click(next(one for one in page[start:] if "trash" in one.classes))


def coordinate(asked: str, page: list[Element]) -> Calls:
    (place,) = re.findall(r"\(-?\d,-?\d\)", asked)
    yield click(next(one for one in page if one.id == place))


SCRIPTS: dict[str, Script] = {
    "click-test": only_button,
    "click-test-2": button_one,
    "click-test-transfer": button_one,
    "click-button": the_button,
    "click-button-sequence": both_buttons,
    "click-link": the_link,
    "click-checkboxes": the_boxes,
    "click-checkboxes-large": the_boxes,
    "click-checkboxes-transfer": the_boxes,
    "click-option": the_boxes,
    "click-dialog": close_dialog,
    "click-dialog-2": dialog_button,
    "click-tab": the_tab,
    "click-widget": the_widget,
    "click-scroll-list": from_list,
    "choose-list": from_list,
    "enter-text": enter,
    "enter-text-2": enter,
    "enter-text-dynamic": enter,
    "enter-password": enter,
    "login-user": log_in,
    "focus-text": the_field,
    "focus-text-2": the_field,
    "find-word": the_word,
    "simple-arithmetic": arithmetic,
    "simple-algebra": algebra,
    "read-table": from_table,
    "read-table-2": labels_from_table,
    "text-transform": letters,
    "unicode-test": the_button,
    "odd-or-even": odd_or_even,
    "multi-orderings": find_films,
    "email-inbox-delete": delete_mail,
    "grid-coordinate": coordinate,
}

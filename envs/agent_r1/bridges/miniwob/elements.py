"""The text of a MiniWoB++ page as lines: the leaves of its tree, each with the number by which it is clicked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Element:
    """A part of a page: text (without `ref`), or an element with the number by which it is clicked."""

    tag: str
    text: str = ""
    ref: int | None = None
    value: str | bool | None = None
    id: str = ""
    classes: str = ""
    background: str = ""
    focused: bool = False
    options: list[str] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.ref is None:
            return self.text
        parts = [f"[{self.ref}] {self.tag.replace('_', ' ')}"]
        if self.text:
            parts.append(f'"{self.text}"')
        elif isinstance(self.value, str):
            parts.append(f'with "{" ".join(self.value.split())}"')
        elif self.value is not None:
            parts.append("checked" if self.value else "not checked")
        elif self.options:
            parts.append(f"of {' | '.join(self.options)}; chosen: {' | '.join(self.chosen) or 'nothing'}")
        else:  # only names and colours can describe it
            names = [f"#{self.id}"] * bool(self.id) + [f".{name}" for name in self.classes.split()[:3]]
            parts += names + [self.background] * bool(self.background)
        return " ".join(parts) + ", focused" * self.focused


def elements(dom: dict[str, Any], lists: dict[str, Any]) -> Iterator[Element]:
    """Yield the leaves of MiniWoB's tree in the page's order."""
    ref, tag, children = dom["ref"], dom["tag"].lower(), dom["children"]
    text = " ".join(str(dom.get("text", "")).split())
    if tag == "t":
        if dom["left"] > -1000:  # jQuery hides the words of icons far to the left
            yield Element(tag, text)
        return
    seen = [child for child in children if child["tag"] != "t" or child["left"] > -1000]
    if str(ref) in lists:
        yield Element(tag, ref=ref, focused=bool(dom.get("focused")), **lists[str(ref)])
    elif seen and all(child["tag"] == "t" for child in seen):
        yield Element(tag, " ".join(child["text"] for child in seen), ref, focused=bool(dom.get("focused")))
    elif tag in ("button", "a") or not seen:
        inside = [element for child in seen for element in elements(child, lists)]
        words = " ".join([text, *(element.text for element in inside)]).strip()
        color = str(dom.get("bgColor") or "")
        classes = dom["classes"] if isinstance(dom.get("classes"), str) else ""  # an SVG's are an object
        if not words and inside:  # the content of a button without words describes it best
            classes = " ".join(element.classes.split()[-1] for element in inside if element.classes)
        known = dom.get("value") is not None or words or tag in ("button", "a", "input_text", "textarea")
        shown = color if not known and color.startswith("rgb(") else ""  # rgba is transparent here
        if (known or shown or dom.get("id") or classes) and "ui-resizable-handle" not in classes:
            yield Element(tag, words, ref, dom.get("value"), str(dom.get("id", "")), classes, shown,
                          bool(dom.get("focused")))  # fmt: skip
    else:
        for child in seen:
            yield from elements(child, lists)

"""Reads a page as a browser would: nesting is checked; tags, texts and what it would load are collected."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "img", "link", "br", "input", "hr"}


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def said(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def read(html: str) -> Page:
    """The page, which is well formed and loads nothing from elsewhere."""
    page = Page()
    page.feed(html)
    page.close()
    assert page.stack == []
    assert not re.search(r"https?://|url\(|@import|<link|<script", html)
    return page

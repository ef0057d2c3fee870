"""The colours of all pictures, and what becomes of text and lines on a dark page."""

from __future__ import annotations

INK, SOFT, LINE, BACK, ALARM = "#23241f", "#6d6e65", "#c9c8c0", "#fbfaf7", "#b3261e"
WHITE, DARK_GREY, GREY, LIGHT_GREY, PALE_GREY = "#ffffff", "#4a4b45", "#9a9a8c", "#bdbdae", "#efeee8"
BLUE, GREEN, CYAN, YELLOW, RED, VIOLET = "#8db4e8", "#8fc99a", "#86cfd3", "#e8ca7c", "#e39b8b", "#b9a0d8"
DEEP_BLUE, DEEP_GREEN, DEEP_RED = "#5b7fb5", "#2f7d46", "#a3430f"
#: For large areas under text, one after the other.
PALE = ("#d6e4f7", "#d9efdd", "#f7e6c8", "#e9dff5", "#f6dcd6")
#: A style sheet for readers who prefer a dark page.
DARK = (
    "@media(prefers-color-scheme:dark){.back{fill:#191a17}.ink{fill:#e4e3db}.soft{fill:#98998f}.line{stroke:#4a4b45}"
    ".over{stroke:#191a17}"
    ".box{fill:#26272300;stroke:#98998f}}"
)

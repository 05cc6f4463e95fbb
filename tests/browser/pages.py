"""The reports that tests open in a browser, and how they act on them."""

AUDITS = {
    "usual": {},
    "hostile": {"nodes": 60, "hostile": True, "synthetic": True},
    "empty": {"empty": True},
    "one-format": {"nodes": 30, "formats": ("bf16",), "recommended": None},
    "large": {"nodes": 3000},
}
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def press(page, selector, key):
    page.run(
        f"document.querySelector({selector!r}).dispatchEvent(new KeyboardEvent('keydown', {{key: {key!r}, bubbles: true}}))"
    )

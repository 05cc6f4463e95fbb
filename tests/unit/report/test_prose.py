from auditor.report.prose import Block, blocks, sentence, summary

ADVICE = """
Derive the literal
from the dtype:

    low = torch.finfo(x.dtype).min

    x = x.masked_fill(mask, low)

Or leave it.
"""


def test_paragraphs_are_joined_and_code_keeps_its_lines():
    assert blocks(ADVICE) == (
        Block("Derive the literal from the dtype:", code=False),
        Block("low = torch.finfo(x.dtype).min\n\nx = x.masked_fill(mask, low)", code=True),
        Block("Or leave it.", code=False),
    )
    assert blocks("  \n") == ()


def test_a_summary_has_no_code():
    assert summary(ADVICE) == "Derive the literal from the dtype. Or leave it."


def test_messages_become_sentences():
    assert sentence("\nthe literal\n1e-9 vanishes") == "The literal 1e-9 vanishes."
    assert sentence("Really?") == "Really?"
    assert sentence("") == ""

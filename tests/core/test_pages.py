"""What all pages share: texts that keep together what belongs together, and show no markup of others."""

from __future__ import annotations

from stratbench.cell.text.pages import (
    allow_line_breaks,
    format_html_safe_json,
    insert_no_break_spaces,
    render_page,
)


def test_no_line_ends_between_a_number_and_its_sign():
    told = "ddp × 8 takes 5 % longer (95 %), on 8 hosts"
    assert insert_no_break_spaces(told).split(" ") == [
        "ddp\u00a0×\u00a08", "takes", "5\u00a0%", "longer", "(95\u00a0%),", "on", "8", "hosts",
    ]  # fmt: skip


def test_a_name_may_be_broken_at_its_joints_and_stays_text():
    assert allow_line_breaks("convnext_large") == "convnext_<wbr>large"
    assert allow_line_breaks("my_nets:Wide/v1.2-a") == "my_<wbr>nets:Wide/<wbr>v1.<wbr>2-a"
    assert allow_line_breaks("<b>_&") == "&lt;b&gt;_<wbr>&amp;"


def test_a_page_escapes_values_and_a_text_for_a_terminal_does_not(tmp_path):
    for name, shown in (("p.html.j2", "a_<wbr>b 5\u00a0% &lt;i&gt;"), ("p.txt.j2", "a_b 5 % <i>")):
        what = "{{ n | breakable }}" if name == "p.html.j2" else "{{ n }}"
        (tmp_path / name).write_text(what + " {{ told }}", encoding="utf-8")
        assert render_page(name, tmp_path, values={"n": "a_b", "told": "5 % <i>"}) == shown


def test_data_in_a_page_is_no_markup():
    assert format_html_safe_json({"a": "</script>"}) == '{"a":"\\u003c/script\\u003e"}'

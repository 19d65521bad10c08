"""The page for browsers, in a real one: it chats, draws, follows light and dark, and runs nothing it is given."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.server.running import RunningServer
from tests.ui.browser import Browser

ANSWER = "document.querySelector('.turn.model .text')?.textContent"
MEASURES = "document.querySelectorAll('.measures').length"


def ask(page: Browser, text: str, **settings: str) -> None:
    """Give settings by the ids of their fields, and send a message with the keyboard."""
    for field, value in settings.items():
        page.fill("#" + field.replace("_", "-"), value)
    page.fill("#prompt", text)
    page.press("Enter")


def facts(page: Browser) -> dict[str, str]:
    """The line under the last answer."""
    return dict(
        page.evaluate(
            "[...[...document.querySelectorAll('.measures')].at(-1).children]"
            ".map(pair => [...pair.children].map(part => part.textContent))"
        )
    )


def test_a_message_gets_a_streamed_answer_and_its_measures(page: Browser, server: RunningServer) -> None:
    page.evaluate(
        f"globalThis.lengths = new Set(); new MutationObserver(() => lengths.add(({ANSWER} ?? '').length))"
        ".observe(document.querySelector('#log'), {subtree: true, childList: true, characterData: true})"
    )
    ask(page, "Name three colours.", temperature="0", max_tokens="40", system="Be brief.")
    page.wait_for(f"{MEASURES} === 1")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three colours."}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 40}
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json=body).json()
    assert page.evaluate(ANSWER) == answer["choices"][0]["message"]["content"]
    assert page.evaluate("lengths.size") > 5  # it grew, rather than came at once
    shown = facts(page)
    assert re.fullmatch(r"\d+ ms|\d+\.\d\d s", shown["TTFT"])
    assert re.fullmatch(r"[\d.]+ tokens/s", shown["Speed"])
    assert shown["Answer"] == f"{answer['usage']['completion_tokens']} tokens"
    assert shown["Ended by"] == answer["choices"][0]["finish_reason"]
    assert page.evaluate("document.querySelector('#prompt').value") == ""


def test_a_conversation_is_remembered_until_a_new_one_is_begun(page: Browser) -> None:
    page.evaluate(
        "globalThis.bodies = []; globalThis.realFetch = fetch;"
        "globalThis.fetch = (url, options) => {if (options?.body) bodies.push(JSON.parse(options.body));"
        " return realFetch(url, options)}"
    )
    ask(page, "My name is Ada.", temperature="0", max_tokens="12", seed="4")
    page.wait_for(f"{MEASURES} === 1")
    ask(page, "And mine?")
    page.wait_for(f"{MEASURES} === 2")
    page.click("#clear")
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0
    ask(page, "Hello")
    page.wait_for(f"{MEASURES} === 1")
    first, second, third = page.evaluate("bodies")
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert [message["content"] for message in third["messages"]] == ["Hello"]
    assert (first["temperature"], first["max_tokens"], first["seed"]) == (0, 12, 4)
    assert "top_p" not in first
    page.evaluate("globalThis.fetch = realFetch")


def test_a_text_is_continued(page: Browser, server: RunningServer) -> None:
    page.click("input[value=completion] + span")
    assert page.text("#send") == "Continue"
    assert page.evaluate("document.querySelector('#system-field').hidden")
    ask(page, "The capital of France is", temperature="0", max_tokens="8")
    page.wait_for(f"{MEASURES} === 1")
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    with server.client() as http:
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert page.evaluate(ANSWER) == "The capital of France is" + text


def test_an_answer_can_be_stopped(page: Browser, server: RunningServer) -> None:
    page.click("input[value=completion] + span")
    ask(page, "Once upon a time", max_tokens="1500")
    page.wait_for(f"({ANSWER} ?? '').length > 40")
    page.click("#stop")
    page.wait_for(f"{MEASURES} === 1")
    assert facts(page)["Ended by"] == "stop button"
    server.until(lambda: server.serving.llm.num_running == 0)
    assert page.evaluate("document.querySelector('#stop').hidden")


def test_shift_and_enter_begin_a_new_line(page: Browser) -> None:
    page.fill("#prompt", "one")
    page.press("Enter", shift=True)
    page.type("two")
    assert page.evaluate("document.querySelector('#prompt').value") == "one\ntwo"
    assert page.evaluate("document.querySelectorAll('.turn').length") == 0


def test_an_error_is_shown_and_the_message_comes_back(page: Browser) -> None:
    ask(page, "Hello", max_tokens="100000")
    page.wait_for("document.querySelector('.problem')")
    assert page.text(".problem strong") == "Error 400"
    assert "maximum context length is 2048 tokens" in page.text(".problem span")
    assert page.evaluate("document.querySelector('#prompt').value") == "Hello"
    # The browser itself tells of the status.
    page.problems[:] = [problem for problem in page.problems if "400 (Bad Request)" not in problem]


def test_an_error_in_the_middle_of_an_answer_is_shown(page: Browser) -> None:
    events = [
        {"choices": [{"index": 0, "delta": {"content": "Half an"}, "finish_reason": None}]},
        {"error": {"message": "The engine stopped.", "type": "InternalServerError", "param": None, "code": 500}},
    ]
    stub_fetch(page, events)
    ask(page, "Hello")
    page.wait_for("document.querySelector('.problem')")
    assert page.evaluate(ANSWER) == "Half an"
    assert page.text(".problem") == "Error 500The engine stopped."


def test_markup_is_shown_as_text(page: Browser) -> None:
    attack = "<img src=x onerror='globalThis.stolen=1'><script>globalThis.stolen=1</script>&lt;b&gt;"
    events = [
        {"choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}]}
        for part in re.findall(".", attack)
    ]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": attack}]})
    stub_fetch(page, events)
    ask(page, attack)
    page.wait_for(f"{MEASURES} === 1")
    assert page.evaluate(ANSWER) == attack
    assert page.evaluate("document.querySelector('.turn.user .text').textContent") == attack
    assert facts(page)["Ended by"] == attack
    assert page.evaluate("document.querySelectorAll('#log img, #log script, #log b').length") == 0
    assert page.evaluate("globalThis.stolen") is None


def stub_fetch(page: Browser, events: list[dict[str, Any]]) -> None:
    """Answer the next chat of the page with these events, cut into pieces in unlucky places."""
    text = (
        ": a comment\r\n\r\n"
        + "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in events)
        + "data: [DONE]\r\n\r\n"
    )
    page.evaluate(
        "(() => { const real = fetch; globalThis.fetch = (url, options) => {"
        " if (!url.startsWith('/v1/chat')) return real(url, options);"
        f" const bytes = new TextEncoder().encode({json.dumps(text)});"
        " return Promise.resolve(new Response(new ReadableStream({start(controller) {"
        "   for (let at = 0; at < bytes.length; at += 7) controller.enqueue(bytes.slice(at, at + 7));"
        "   controller.close(); }}))); }; return 1; })()"
    )


def test_the_charts_follow_the_server(page: Browser) -> None:
    page.click("input[value=completion] + span")
    ask(page, "Once upon a time", max_tokens="600")
    shown = "document.querySelector('#chart-{} .chart-value').textContent"
    page.wait_for(f"parseFloat({shown.format('throughput')}) > 0")
    page.wait_for(f"{shown.format('requests')} === '1'")
    page.wait_for(f"parseFloat({shown.format('cache')}) > 0")
    page.wait_for(f"parseFloat({shown.format('ttft')}) > 0")
    for name in ("throughput", "ttft", "requests", "cache"):
        page.wait_for(f"document.querySelector('#chart-{name} .line-1')?.getTotalLength() >= 0")
        label = page.evaluate(f"document.querySelector('#chart-{name} svg').getAttribute('aria-label')")
        assert re.search(r"\d", label), label
    assert page.evaluate("document.querySelector('#charts').dataset.state") == "live"
    assert page.text("#health") == "ready"
    page.click("#stop")


def test_pointing_at_a_chart_tells_the_value_there(page: Browser) -> None:
    page.wait_for("document.querySelector('#chart-requests .dot-1')")
    box = page.evaluate(
        "(b => [b.right - 4, b.y + 30])(document.querySelector('#chart-requests svg').getBoundingClientRect())"
    )
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    page.wait_for("document.querySelector('#chart-requests .chart-detail').textContent.includes('s ago')")
    page.send("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    page.wait_for("!document.querySelector('#chart-requests .chart-detail').textContent.includes('s ago')")


def test_light_and_dark_follow_the_system_until_another_choice_is_made(page: Browser, server: RunningServer) -> None:
    def brightness() -> float:
        colour = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
        return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / (3 * 255)

    assert brightness() > 0.8
    page.show_as(1280, 860, dark=True)
    page.wait_for("document.querySelector('#theme').getAttribute('aria-pressed') === 'true'")
    assert brightness() < 0.2
    page.click("#theme")
    assert brightness() > 0.8
    page.open(server.url + "/?again")
    assert brightness() > 0.8  # the choice is kept
    page.click("#theme")
    assert brightness() < 0.2
    page.show_as(1280, 860)
    page.wait_for("document.querySelector('#theme').getAttribute('aria-pressed') === 'false'")
    assert brightness() > 0.8  # back at the system's choice, it is followed again


@pytest.mark.parametrize("width", [320, 390, 700, 1000])
def test_it_fits_narrow_windows(page: Browser, width: int) -> None:
    page.show_as(width, 740, phone=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    overflowing = page.evaluate(
        "[...document.querySelectorAll('main *, header *')].filter(e => e.getClientRects().length &&"
        " e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.sr, .skip'))"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert overflowing == []


def test_every_control_has_a_name_and_can_be_reached_with_the_keyboard(page: Browser) -> None:
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    roles = {"textbox", "button", "link", "combobox", "spinbutton", "radio", "image"}
    controls = [node for node in nodes if node.get("role", {}).get("value") in roles and not node.get("ignored")]
    assert len(controls) >= 14
    assert [node for node in controls if not node.get("name", {}).get("value")] == []
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(25):
        page.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.value || ''"))
    for id_ in ("theme", "log", "prompt", "send", "model", "system", "temperature", "max-tokens", "seed", "api-key"):
        assert id_ in reached


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_what_is_behind_it(page: Browser, dark: bool) -> None:
    """WCAG's contrast of 4.5 for every text, 3 for the edges of fields."""
    page.show_as(1280, 860, dark=dark)
    ask(page, "Hi", max_tokens="3")
    page.wait_for(f"{MEASURES} === 1")
    low = page.evaluate(
        """(() => {
          const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
            .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          const read = colour => colour.match(/[\\d.]+/g).map(Number);
          const behind = e => { for (; e; e = e.parentElement) {
            const c = read(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] === 1) return c; } };
          const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
            return (x + 0.05) / (y + 0.05); };
          const low = [];
          for (const e of document.querySelectorAll('body *')) {
            if (!e.getClientRects().length || e.closest('.sr, .skip')) continue;
            const style = getComputedStyle(e);
            const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
            const colour = e.closest('svg') ? style.fill : style.color;
            if (own && e.tagName !== 'OPTION') {
              const found = contrast(read(colour), behind(e));
              if (found < 4.5) low.push([e.outerHTML.slice(0, 60), found]);
            }
            const field = ['INPUT', 'SELECT', 'TEXTAREA'].includes(e.tagName) && e.type !== 'radio';
            if (field && style.borderTopWidth !== '0px') {
              const found = contrast(read(style.borderTopColor), behind(e.parentElement));
              if (found < 3) low.push(['edge of ' + e.id, found]);
            }
          }
          return low;
        })()"""
    )
    assert low == []


def test_a_key_is_asked_for_and_forgotten_with_the_tab(page: Browser, server: RunningServer) -> None:
    with RunningServer(server.serving.llm, api_key=("secret",)) as guarded:
        page.open(guarded.url + "/")
        page.wait_for("document.querySelector('#model-line').textContent.includes('API key')")
        page.wait_for("document.querySelector('#charts').dataset.state === 'locked'")
        ask(page, "Hello", max_tokens="4")
        page.wait_for("document.querySelector('.problem')")
        assert page.text(".problem strong") == "Error 401"
        page.wait_for("document.activeElement.id === 'api-key'")
        page.fill("#api-key", "secret")
        page.wait_for("document.querySelector('#model').value")
        page.click("#send")
        page.wait_for(f"{MEASURES} === 1")
        page.wait_for("document.querySelector('#charts').dataset.state === 'live'")
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert "secret" in page.evaluate("JSON.stringify(sessionStorage)")
        page.evaluate("1")
        page.problems[:] = [problem for problem in page.problems if "401 (Unauthorized)" not in problem]


def test_a_server_that_is_gone_is_told(page: Browser, server: RunningServer) -> None:
    with RunningServer(server.serving.llm) as short:
        page.open(short.url + "/")
        page.wait_for("document.querySelector('#health').dataset.state === 'well'")
    page.wait_for("document.querySelector('#health').textContent === 'server not reachable'")
    assert page.evaluate("document.querySelector('#charts').dataset.state") == "lost"
    page.open(server.url + "/")
    page.problems[:] = [problem for problem in page.problems if "ERR_" not in problem]


def test_nothing_is_loaded_from_elsewhere_and_nothing_inline_runs(page: Browser, server: RunningServer) -> None:
    loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded
    assert all(url.startswith(server.url + "/") for url in loaded)
    page.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'globalThis.inline = 1';"
        " document.head.append(s); return 1; })()"
    )
    assert page.evaluate("globalThis.inline") is None
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'kept')") == "kept"
    page.evaluate("1")
    told = [problem for problem in page.problems if "Content Security Policy" in problem]
    assert len(told) >= 2
    page.problems.clear()

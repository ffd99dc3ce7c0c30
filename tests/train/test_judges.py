"""Chat judges against a local stub: what they are asked, how answers score, what is refused."""

import base64
import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

from train.judges import chat_url, questions_of
from train.rewards import RewardClient, RewardConfig, RewardOutageError, resolve_rewards

GENEVAL = {
    "tag": "position",
    "include": [
        {"class": "dog", "count": 2, "color": "red"},
        {"class": "cup", "count": 1, "position": ["left of", 0]},
    ],
    "prompt": 'a "red" dog',
}
TIIF = {
    "prompt": "two dogs",
    "yn_question_list": ["Are there dogs?", "Is there a cat?", "Two dogs?"],
    "yn_answer_list": ["yes", "No", "yes"],
}
PICTURE = Image.new("RGB", (32, 32), "red")


class StubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        status, text = self.server.answers[min(len(self.server.seen), len(self.server.answers)) - 1]
        content = text.encode()
        if status == 200:
            message = {"role": "assistant", "content": text}
            content = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def judge(*answers):
    """A chat endpoint that gives these (status, text) in turn, the last one for ever."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), StubHandler)
    server.daemon_threads = True
    server.seen, server.answers = [], list(answers)
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def score(server, kind, metadata, policy="skip", **changes):
    config = RewardConfig(
        urls=(server.url,),
        kind=kind,
        api_key="the-key",
        model_name="the-model",
        **{"request_timeout_s": 2.0, "backoff_s": 0.02, **changes},
    )
    with RewardClient(config, 0) as client:
        return resolve_rewards(client.submit([PICTURE], [metadata]), 5.0, policy)[0]


def numbers(result):
    assert result.error is None, result.error
    return result.score, result.reward, result.strict_reward


def checklist(checks, correct, quality):
    return json.dumps({"checks": checks, "correct": correct, "quality": quality})


def test_what_the_judge_is_asked():
    with judge((200, checklist(["yes"], 1, 9))) as server:
        assert numbers(score(server, "geneval_plus", GENEVAL)) == (1.0, 1.0, 1.0)
        path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer the-key"
    assert body["model"] == "the-model" and body["temperature"] == 0
    system, user = body["messages"]
    assert system["role"] == "system" and "JSON" in system["content"]
    picture, text = user["content"]
    data = picture["image_url"]["url"].removeprefix("data:image/jpeg;base64,")
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (32, 32)
    assert '"a \\"red\\" dog"' in text["text"], "the prompt is quoted"
    assert "2 red dog" in text["text"] and "cup left of dog" in text["text"]
    assert '{"checks"' in text["text"] and "{known}" not in text["text"]


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (checklist(["yes", "yes"], 1, 10), (1.0, 1.0, 1.0)),
        (checklist(["yes", "YES "], 1, 4), (1.0, 1.0, 0.0)),
        (checklist(["yes", "no"], 0, 5), (0.45, 0.0, 0.0)),
        (checklist(["yes", "no"], 1, 5), (0.45, 0.0, 0.0)),
        (checklist(["yes", "yes"], 0, 10), (0.9, 0.0, 0.0)),
        (checklist(["no"], 0, 0), (0.0, 0.0, 0.0)),
        ("```json\n" + checklist(["no"], 0, 10) + "\n```", (0.2, 0.0, 0.0)),
        ("<think>{hm}</think>\n" + checklist(["yes"], True, 5.5), (1.0, 1.0, 1.0)),
    ],
)
def test_checklist_scores(answer, wanted):
    with judge((200, answer)) as server:
        assert numbers(score(server, "geneval_plus", GENEVAL)) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["yes", "no", "yes"], (1.0, 1.0, 1.0)),
        (["Yes", "yes", "no"], (1 / 3, 0.0, 0.0)),
        (["no", "yes", "no"], (0.0, 0.0, 0.0)),
    ],
)
def test_tiif_scores_against_its_answers(given, wanted):
    with judge((200, json.dumps({"answers": given}))) as server:
        assert numbers(score(server, "tiif", TIIF)) == pytest.approx(wanted)
        text = server.seen[0][2]["messages"][1]["content"][1]["text"]
    assert "1. Are there dogs?\n2. Is there a cat?\n3. Two dogs?" in text
    assert "exactly 3 entries" in text


def test_tiif_without_questions_asks_about_the_prompt():
    assert questions_of({"prompt": "a cat"}) == [
        ('Does the picture show everything that this description asks for: "a cat"?', True)
    ]
    with judge((200, '{"answers": ["no"]}')) as server:
        assert numbers(score(server, "tiif", GENEVAL)) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("It looks good: 9/10", "not one JSON object"),
        ("[1]", "not one JSON object"),
        ("", "not one JSON object"),
        ("[" * 100_000, "nested too deeply"),
        (checklist(["maybe"], 1, 9), "'maybe' is neither yes nor no"),
        (checklist([], 1, 9), "no check was made"),
        (checklist("yes", 1, 9), "'checks' is missing"),
        (checklist(["yes"], 2, 9), "'correct' must be 0 or 1, not '2'"),
        (checklist(["yes"], None, 9), "'correct' must be 0 or 1"),
        (checklist(["yes"], 1, 11), "'quality' must be 0 to 10, not '11'"),
        (checklist(["yes"], 1, float("nan")), "'quality' must be 0 to 10"),
        (checklist(["yes"], 1, True), "'quality' must be 0 to 10"),
        (checklist(["yes"], 1, 9) + " Good!", "not one JSON object"),
    ],
)
def test_other_answers_are_asked_for_again_and_then_named(answer, message):
    with judge((200, answer)) as server:
        result = score(server, "geneval_plus", GENEVAL, retries=1)
        assert len(server.seen) == 2
    assert result.retries == 1 and result.error.startswith("JudgeAnswerError")
    with pytest.raises(AssertionError, match=message):
        numbers(result)


def test_too_few_tiif_answers():
    with judge((200, '{"answers": ["yes"]}')) as server:
        assert "1 answers to 3 questions" in score(server, "tiif", TIIF, retries=0).error


def test_a_busy_judge_and_a_bad_answer_pass():
    with judge((429, "slow down"), (200, "hm"), (200, checklist(["yes"], 1, 9))) as server:
        result = score(server, "geneval_plus", GENEVAL)
    assert numbers(result) == (1.0, 1.0, 1.0) and result.retries == 2


def test_a_wrong_key_ends_at_once_and_is_not_shown():
    with judge((401, '{"error": "bad key"}')) as server:
        with pytest.raises(RewardOutageError, match="HTTP 401.*bad key") as caught:
            score(server, "tiif", TIIF, policy="abort")
        assert len(server.seen) == 1
    assert "the-key" not in str(caught.value)


@pytest.mark.parametrize(
    "body", ['{"choices": []}', "[]", '{"choices": [{"message": {"content": null}}]}', "<html>"]
)
def test_bodies_that_are_no_chat_completion(body, monkeypatch):
    def do_post(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    monkeypatch.setattr(StubHandler, "do_POST", do_post)
    with judge() as server:
        assert "bad judge answer" in score(server, "tiif", TIIF, retries=0).error


@pytest.mark.parametrize(
    ("kind", "metadata", "message"),
    [
        ("tiif", {"prompt": ""}, "no 'prompt' text"),
        ("geneval_plus", {"include": []}, "no 'prompt' text"),
        ("tiif", {**TIIF, "yn_answer_list": ["yes"]}, "3 questions and 1 answers"),
        ("tiif", {**TIIF, "yn_answer_list": None}, "yn_answer_list"),
        ("tiif", {**TIIF, "yn_answer_list": ["yes", "no", "perhaps"]}, "'perhaps' is neither"),
        ("geneval_plus", {"prompt": "x", "include": [{"count": 1}]}, "cannot read the metadata"),
        ("geneval_plus", {"prompt": "x", "include": 3}, "cannot read the metadata"),
    ],
)
def test_metadata_that_cannot_be_judged_are_refused_before_sending(kind, metadata, message):
    with judge() as server:
        with pytest.raises(ValueError, match=message):
            score(server, kind, metadata)
        assert not server.seen


def test_chat_url_with_and_without_v1():
    wanted = "http://h/v1/chat/completions"
    assert {chat_url(base) for base in ("http://h", "http://h/v1", wanted)} == {wanted}

"""`hotlap serve` from outside: the real `openai` client, raw requests, clients that hang up."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

import hotlap
from hotlap.commands.results import next_steps
from hotlap.inference.options import SampleOptions
from hotlap.serve.engine import Engine
from hotlap.serve.guard import LARGEST_BODY, HostNames
from tests.command import complaint
from tests.serving import CONTEXT, loaded_run, running
from tests.trained_run import in_process, trained_run

PROMPT = "time people"


@pytest.fixture(scope="module")
def server():
    with running(names=("lap", "other")) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}v1", api_key="none", max_retries=0) as made:
        yield made


def written_by_sample(prompt: str, **options) -> list[str]:
    """What `hotlap sample` writes after the prompt."""
    return [text.removeprefix(prompt) for text in loaded_run().generate(prompt, **options)]


def ids_of_sample(prompt: str, **options) -> list[int]:
    return [token for (token,) in loaded_run().generate_steps(prompt, SampleOptions(**options))]


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["lap", "other"]
    assert client.models.retrieve("other").owned_by == "hotlap"


def test_a_seed_gives_the_text_of_hotlap_sample_every_time(client):
    asked = {"prompt": PROMPT, "seed": 5, "temperature": 0.9, "max_tokens": 40}
    (expected,) = written_by_sample(PROMPT, seed=5, temperature=0.9, max_tokens=40)
    for _ in range(2):
        answer = client.completions.create(model="lap", **asked)
        assert answer.choices[0].text == expected
    assert answer.object == "text_completion"
    assert answer.usage.prompt_tokens == len(loaded_run().tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == len(
        ids_of_sample(PROMPT, seed=5, temperature=0.9, max_tokens=40)
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    other = client.completions.create(model="lap", **{**asked, "seed": 6})
    assert other.choices[0].text != expected


def test_texts_of_a_request_are_the_samples_of_its_seed_for_every_prompt(client):
    answer = client.completions.create(
        model="lap", prompt=[PROMPT, "law"], n=3, seed=2, max_tokens=20, temperature=0.8
    )
    expected = [
        text
        for prompt in (PROMPT, "law")
        for text in written_by_sample(prompt, num_samples=3, seed=2, max_tokens=20)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(6))


def test_a_text_does_not_depend_on_its_company(client, server):
    if "rounding" in Engine(loaded_run(), 9, 0).repeatability():
        pytest.skip("this processor rounds a row of a larger batch otherwise")
    asked = [
        {
            "prompt": "people " * (3 * number),
            "seed": number,
            "max_tokens": 20 + 17 * number,
            "temperature": 0.5 + number / 10,
            "top_p": 0.9 if number % 2 else None,
            "extra_body": {"top_k": 20} if number % 3 else None,
        }
        for number in range(12)  # more than there are rows
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: client.completions.create(model="lap", **one), asked))
    for one, answer in zip(asked, together, strict=True):
        extra = one.pop("extra_body") or {}
        assert [answer.choices[0].text] == written_by_sample(one.pop("prompt"), **one, **extra)


def test_a_stream_is_the_text_in_pieces_and_ends_with_the_usage(client):
    asked = {"prompt": PROMPT, "seed": 1, "max_tokens": 60, "n": 2}
    whole = client.completions.create(model="lap", **asked)
    texts, endings = ["", ""], ["", ""]
    chunks = list(
        client.completions.create(model="lap", **asked, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            endings[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert endings == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len(chunks) > 4


def test_a_text_ends_before_its_stop_sequence(client):
    asked = {"model": "lap", "prompt": PROMPT, "seed": 1, "max_tokens": 100}
    text = client.completions.create(**asked).choices[0].text
    stop = text[30:34]
    for stops in (stop, ["never in it", stop]):
        choice = client.completions.create(**asked, stop=stops).choices[0]
        assert choice.text == text[: text.index(stop)]
        assert choice.finish_reason == "stop"
        pieces = list(client.completions.create(**asked, stop=stops, stream=True))
        assert "".join(piece.choices[0].text for piece in pieces) == choice.text


def test_log_probabilities_are_those_of_the_model(client):
    asked = {"seed": 1, "max_tokens": 8, "temperature": 0.7}
    answer = client.completions.create(model="lap", prompt=PROMPT, logprobs=3, echo=True, **asked)
    choice, tokenizer = answer.choices[0], loaded_run().tokenizer
    assert choice.text.startswith(PROMPT)
    prompt = tokenizer.encode(PROMPT).tolist()
    ids = [*prompt, *ids_of_sample(PROMPT, **asked)]
    logits = loaded_run().logits([tokenizer.end_of_text, *ids])[:-1, : tokenizer.vocab_size]
    expected = logits.double().log_softmax(-1)
    told, own = choice.logprobs, expected[range(len(ids)), ids]
    assert told.token_logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert len(told.top_logprobs) == len(told.tokens) == len(ids)
    for row, likeliest in zip(expected, told.top_logprobs, strict=True):
        values = sorted(likeliest.values(), reverse=True)
        assert values == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert told.tokens[: len(prompt)] == [tokenizer.decode([one]) for one in prompt]
    assert told.text_offset[: len(prompt) + 1][-1] == len(PROMPT)
    scored = client.completions.create(model="lap", prompt=ids, max_tokens=0, logprobs=1, echo=True)
    assert scored.choices[0].logprobs.token_logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert scored.usage.completion_tokens == 0


@pytest.mark.parametrize(
    "wrong, status, said",
    [
        ({"model": "gpt-4"}, 404, "does not exist"),
        ({"model": None}, 400, "must provide a model"),
        ({"prompt": "word " * CONTEXT}, 400, "maximum context length is 512"),
        ({"max_tokens": CONTEXT}, 400, "maximum context length"),
        ({"prompt": [1, 10**6]}, 400, "Token ids go from 0"),
        ({"prompt": {"text": "x"}}, 400, "expected a string, token ids"),
        ({"prompt": []}, 400, "Invalid type for `prompt`"),
        ({"temperature": "hot"}, 400, "expected a number, but got a string"),
        ({"temperature": -1}, 400, "at least 0"),
        ({"top_p": 0}, 400, "top-p"),
        ({"n": 0}, 400, "`n` must be at least 1"),
        ({"n": 1000}, 400, "at most 16 texts"),
        ({"n": True}, 400, "expected an integer, but got a boolean"),
        ({"logprobs": 100}, 400, "at most 20"),
        ({"seed": -1}, 400, "at least 0"),
        ({"seed": 10**30}, 400, "at most"),
        ({"stop": [""]}, 400, "none of them empty"),
        ({"stream": "yes"}, 400, "expected a boolean"),
        ({"stream_options": 3}, 400, "expected an object"),
        ({"best_of": 4}, 400, "best_of"),
        ({"suffix": "end"}, 400, "`suffix` is not supported"),
        ({"max_token": 3}, 400, "Unrecognized request argument supplied: max_token"),
    ],
)
def test_wrong_requests_are_told_in_the_shape_of_the_api(server, wrong, status, said):
    found, answer = server.complete(**wrong)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert said in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b'{"n": NaN}', b"[" * 100_000, b""])
def test_a_body_that_is_no_json_object(server, body):
    status, answer = server.ask("POST", "/v1/completions", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_the_client_raises_its_own_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="maximum context length") as raised:
        client.completions.create(model="lap", prompt="x" * 5000)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError, match=f"at most {LARGEST_BODY:,} bytes") as raised:
        client.completions.create(model="lap", prompt="x" * 10_000_000)
    assert raised.value.status_code == 413
    with pytest.raises(openai.NotFoundError, match="base models"):
        client.chat.completions.create(model="lap", messages=[{"role": "user", "content": "Hi"}])


def test_other_addresses_and_methods(server):
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
        found, answer = server.ask(method, path)
        assert (found, answer["error"]["type"]) == (status, "invalid_request_error")


def test_pages_of_other_sites_are_refused(server):
    port = server.port
    for headers, status in (
        ({"Host": f"evil.example:{port}"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": f"localhost:{port}"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": f"http://127.0.0.1:{port}"}, 200),
    ):
        assert server.ask("GET", "/v1/models", **headers)[0] == status, headers
    # As a form of another site would send it, without asking the server first.
    status, _ = server.ask("POST", "/v1/completions", b"{}", **{"Content-Type": "text/plain"})
    assert status == 415


def test_names_of_a_server_that_others_reach():
    names = HostNames("0.0.0.0", ["gpu.lan"])
    assert all(map(names.allow, ("10.0.0.7:8000", "gpu.lan", "GPU.LAN:1", "[::1]:8000", "localhost")))
    assert not any(map(names.allow, ("evil.example", "", "gpu.lan.evil.example", "[::1")))


def test_a_token_is_asked_for_where_one_is_set():
    with running(token="secret") as server:
        assert server.ask("GET", "/v1/models")[0] == 401
        status, answer = server.ask("GET", "/v1/models", Authorization="Bearer wrong")
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert server.ask("GET", "/v1/models", Authorization="Bearer secret")[0] == 200


def test_a_full_queue_is_429_and_a_client_that_hangs_up_costs_nothing_afterwards():
    with running(rows=2, queue=1) as server:
        held = [start_stream(server, 0), start_stream(server, 1), start_stream(server, 2)]
        wait_for(server, lambda state: (state["writing"], state["waiting"]) == (2, 1))
        status, answer = server.complete(prompt="x")
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        for connection in held:
            connection.close()
        wait_for(server, lambda state: (state["writing"], state["waiting"]) == (0, 0))
        steps = server.ask("GET", "/health")[1]["lap"]["steps"]
        assert steps < CONTEXT - 20  # none of them wrote to its end
        time.sleep(0.1)
        assert server.ask("GET", "/health")[1]["lap"]["steps"] == steps
        assert server.complete(prompt="x", max_tokens=2)[0] == 200


def test_one_who_waits_for_a_whole_text_may_hang_up_too():
    with running(rows=1, queue=0) as server:
        connection = send(server, {"max_tokens": CONTEXT - 2, "logprobs": 20})
        wait_for(server, lambda state: state["writing"] == 1)
        connection.close()
        wait_for(server, lambda state: state["writing"] == 0)
        assert server.ask("GET", "/health")[1]["lap"]["steps"] < CONTEXT - 20


def test_a_request_that_takes_too_long_ends_and_frees_its_row():
    with running(rows=1, queue=0, timeout_seconds=0.01) as server:
        status, answer = server.complete(prompt="x", max_tokens=CONTEXT - 10)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        wait_for(server, lambda state: state["writing"] == 0)


def send(server, body) -> socket.socket:
    content = json.dumps({"model": "lap", "prompt": "", "stop": None, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
    return connection


def start_stream(server, seed: int) -> socket.socket:
    return send(server, {"stream": True, "seed": seed, "max_tokens": CONTEXT - 2})


def wait_for(server, condition, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition(server.ask("GET", "/health")[1]["lap"]):
        assert time.monotonic() < until, server.ask("GET", "/health")
        time.sleep(0.002)


def test_wrong_input(capsys, monkeypatch, server):
    run = str(trained_run())

    def said(*arguments: str) -> str:
        return complaint(in_process(capsys, "serve", *arguments))

    assert "HOTLAP_SERVE_TOKEN" in said(run, "--host", "0.0.0.0")
    assert "an address to listen on" in said(run, "--port", str(server.port))
    assert "an address to listen on" in said(run, "--port", "99999")
    assert "--rows of at least 1" in said(run, "--rows", "0")
    assert "--threads of at least 1" in said(run, "--threads", "0")
    assert "--timeout above 0" in said(run, "--timeout", "nan")
    assert "--context of at least 2" in said(run, "--context", "1")
    assert "config.json" in said(str(Path(run).parent), "--port", "0")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert re.search(r"pip install .*starlette uvicorn`$", said(run))


def test_training_ends_by_naming_the_command(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/x/.venv/bin/hotlap"])
    monkeypatch.setattr("shutil.which", lambda _name: None)
    expected = "next: /x/.venv/bin/hotlap play runs/a, or in a browser /x/.venv/bin/hotlap serve runs/a"
    assert next_steps(Path("runs/a")) == expected
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    first = next_steps(Path("runs/a")).removeprefix(expected)
    assert re.fullmatch(r"; first .*pip install .*starlette uvicorn", first)


def test_the_command_serves_and_stops_when_interrupted():
    with subprocess.Popen(
        [sys.executable, "-m", "hotlap", "serve", str(trained_run()), "--port", "0", "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(hotlap.__file__).parents[1],
    ) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        assert "step 3" in lines[0]
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/v1", lines[2])[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = json.dumps({"model": "lap", "max_tokens": CONTEXT - 2, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        process.send_signal(signal.SIGINT)  # while it writes
        rest = answer.read()
        assert b"[DONE]" in rest or b"stopping" in rest
        connection.close()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "stopped\n", "")

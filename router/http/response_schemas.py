"""What routes answer, for the OpenAPI document; a test holds real answers to these."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from outloop.buffer.records import FinishReason
from outloop.router.dialects.table import DIALECTS

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_WHOLE: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NUMBER: Schema = {"type": "number"}
_FLAG: Schema = {"type": "boolean"}
_ANY_OBJECT: Schema = {"type": "object"}


def _object(**fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": list(fields)}


def _list(item: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": item, **bounds}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _just(value: str) -> Schema:
    return {"const": value}


_FINISH: Schema = {"enum": list(get_args(FinishReason))}
_HANDLE = _object(episode_id=_TEXT, base_url=_TEXT, api_key=_TEXT)
_MODEL = _object(id=_TEXT, object=_just("model"), type=_just("model"), display_name=_TEXT)
_SPAN = _object(policy_version=_WHOLE, start=_COUNT, end=_COUNT)
_TURN = _object(
    turn_id=_TEXT,
    parent_turn_id=_maybe(_TEXT),
    prompt_ids=_list(_COUNT),
    output_ids=_list(_COUNT),
    behavior_logprobs=_maybe(_list(_NUMBER)),
    version_spans=_list(_SPAN),
    finish_reason=_FINISH,
    branch_cause=_TEXT,
)
_CLAIM = _object(
    task=_object(task_id=_TEXT, payload={}),
    purpose={"enum": ["train", "eval"]},
    group_id=_TEXT,
    attempt=_COUNT,
    deadline_s=_NUMBER,
    sampling=_maybe(_ANY_OBJECT),
    eval_name=_maybe(_TEXT),
    resumes=_maybe(_TEXT),
    episode=_maybe(_HANDLE),
)
ANSWERS: Mapping[str, Schema] = MappingProxyType(
    {
        "/health": _object(status=_just("ok")),
        "/ready": _object(status=_just("ready"), policy_version=_COUNT),
        "/status": _object(
            run=_TEXT,
            num_steps=_COUNT,
            state=_TEXT,
            is_paused=_FLAG,
            highest_version=_NUMBER,
            parts=_ANY_OBJECT,
            servers=_list(_ANY_OBJECT),
            statuses=_ANY_OBJECT,
            queue=_ANY_OBJECT,
        ),
        "/servers": _object(
            servers=_list(
                _object(server_id=_TEXT, url=_TEXT, num_in_flight=_COUNT, num_failures=_COUNT)
            )
        ),
        "/pause": _object(is_paused=_FLAG),
        "/resume": _object(is_paused=_FLAG),
        "/policy_version": _object(
            announced_version=_maybe(_COUNT), acknowledged_version=_maybe(_COUNT)
        ),
        "/tasks": _object(num_tasks=_COUNT, num_eval_tasks=_COUNT),
        "/tasks/claim": _object(claims=_list(_CLAIM), reason=_TEXT, retry_after_s=_NUMBER),
        "/runners/heartbeat": _object(max_silence_s=_NUMBER),
        "/episodes": _HANDLE,
        "/episodes/{episode_id}": _object(
            opening=_ANY_OBJECT,
            turns=_list(_TURN),
            is_closed=_FLAG,
            outcome=_maybe(_TEXT),
            failure_kind=_maybe(_TEXT),
            reward=_maybe(_ANY_OBJECT),
            error=_TEXT,
            output=_TEXT,
            refusals=_object(counts=_ANY_OBJECT, last=_TEXT),
            resumes=_maybe(_TEXT),
        ),
        "/episodes/{episode_id}/reward": _object(),
        "/episodes/{episode_id}/close": _object(counted=_FLAG, sealed_group=_maybe(_TEXT)),
        "/trajectories": _object(
            num_accepted=_COUNT,
            results=_list(_object(episode_id=_TEXT, counted=_FLAG, error=_TEXT)),
        ),
        "/v1/models": _object(object=_just("list"), data=_list(_MODEL, minItems=1), has_more=_FLAG),
        "/v1/models/{model_id}": _MODEL,
        "/v1/messages/count_tokens": _object(input_tokens=_COUNT),
        # The dialects' answers are OpenAI's and Anthropic's, which document them.
        **dict.fromkeys(DIALECTS, _ANY_OBJECT),
    }
)
"""By path: answers with status 200."""

_NEVER_STREAMED = ("/v1/models", "/v1/models/{model_id}", "/v1/messages/count_tokens")
_OPENAI_ERROR = _object(
    error=_object(message=_TEXT, type=_TEXT, code=_TEXT, param=_maybe(_TEXT)),
)
_ANTHROPIC_ERROR = _object(type=_just("error"), error=_object(type=_TEXT, message=_TEXT))


def responses_of(path: str) -> dict[str, Schema]:
    """The `responses` of the operation at `path`."""
    bare = path.removeprefix("/episodes/{episode_id}") if "/v1/" in path else path
    error = _ANTHROPIC_ERROR if bare.startswith("/v1/messages") else _OPENAI_ERROR
    refused = {"application/json": {"schema": error}}
    done: Schema = {"text/plain; version=0.0.4; charset=utf-8": {"schema": _TEXT}}
    if bare in ANSWERS:
        done = {"application/json": {"schema": ANSWERS[bare]}}
        if bare.startswith("/v1/") and bare not in _NEVER_STREAMED:
            done["text/event-stream"] = {"schema": _TEXT}
    return {
        "200": {"description": "done", "content": done},
        "4XX": {
            "description": "refused; do not retry",
            "headers": {"x-should-retry": _header(_just("false"))},
            "content": refused,
        },
        "503": {
            "description": "not now; retry after `Retry-After`",
            "headers": {
                "Retry-After": _header({"type": "string", "pattern": "^[1-9][0-9]*$"}),
                "x-should-retry": _header(_just("true")),
            },
            "content": refused,
        },
    }


def _header(schema: Schema) -> Schema:
    return {"required": True, "schema": schema}

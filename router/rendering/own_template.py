"""The chat format of a model as its own folder says it: a Jinja template.

For models without a renderer of their own in `renderers`, such as Qwen2.5 and SmolLM2. What
continues a turn is what the template writes after an answer; it is appended to the sampled ids, so
that a branch goes on whatever the template would make of the answer when it renders it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from renderers import DefaultRenderer
from renderers.base import RenderedTokens
from renderers.configs import DefaultRendererConfig

from outloop.buffer.chat_format import chat_template_of, end_ids_of
from outloop.buffer.errors import SettingsError
from outloop.router.rendering.tokenizer import PolicyTokenizer

_ANSWER = "\u2060answer\u2060"
"""Stands for a sampled answer in a rendering; word joiners, so that no template says it."""
_TOOL_CALL = "<tool_call>"


class TemplateTokenizer:
    """A tokenizer that `renderers.DefaultRenderer` can render with; all else is the policy's.

    Raises:
        SettingsError: the folder has no chat template, or it is not Jinja.
    """

    def __init__(self, tokenizer: PolicyTokenizer, folder: Path) -> None:
        source = chat_template_of(folder)
        if source is None:
            raise SettingsError(
                f'model.renderer="default": {str(folder)!r} has no chat template in '
                "tokenizer_config.json or chat_template.jinja; set model.renderer to a family"
            )
        self._tokenizer = tokenizer
        self._knows_tools = "tools" in source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda text: datetime.now(UTC).strftime(text)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise SettingsError(
                f"the chat template in {str(folder)!r} cannot be read: {error}; set model.renderer "
                "to a family"
            ) from error
        self._special = _special_tokens(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def text_of(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, **options: Any
    ) -> str:
        """The rendered conversation.

        Raises:
            ValueError: the template cannot express it.
        """
        if tools and not self._knows_tools:
            raise ValueError("the model's chat template has no place for tools")
        try:
            return self._template.render(
                messages=messages, tools=tools, **{**self._special, **options}
            )
        except TemplateError as error:
            raise ValueError(str(error)) from error

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool,
        return_dict: bool,
        **rest: Any,
    ) -> list[int]:
        """Ids of the rendered conversation, as DefaultRenderer asks for them."""
        return self._tokenizer.encode(self.text_of(messages, **rest))


class OwnTemplateRenderer(DefaultRenderer):
    """Renders by the folder's template, and continues turns without rendering them again.

    Raises:
        SettingsError: as TemplateTokenizer.
    """

    def __init__(
        self, tokenizer: PolicyTokenizer, folder: Path, options: Mapping[str, Any]
    ) -> None:
        self._own = TemplateTokenizer(tokenizer, folder)
        own = dict(options)
        if tokenizer.convert_tokens_to_ids(_TOOL_CALL) is not None:
            own.setdefault("tool_parser", "qwen3")
        super().__init__(self._own, DefaultRendererConfig(**own))
        try:
            written = tokenizer.encode(self._after_answer([], None, is_next=False))[:1]
        except ValueError:
            written = []
        self._end: int | None = next((i for i in written if i in tokenizer.added_ids), None)
        ends = [self._end, tokenizer.eos_token_id, *end_ids_of(folder)]
        self._stops = [one for one in dict.fromkeys(ends) if one is not None]

    def get_stop_token_ids(self) -> list[int]:
        """The end that the template writes after an answer, the tokenizer's, and those at which
        servers end an answer by the folder's configuration."""
        return list(self._stops)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        """The turn's ids, and what the template writes between its stop and the next answer.

        None where the turn did not end with the stop, an assistant's message is among the new ones,
        or the template does not end an answer with the stop.
        """
        stops = self.get_stop_token_ids()
        is_whole = bool(previous_completion_ids) and previous_completion_ids[-1] in stops
        if not is_whole or any(message["role"] == "assistant" for message in new_messages):
            return None
        # Whichever id ended the answer stands where the template writes its own end.
        stop = self._end if self._end is not None else previous_completion_ids[-1]
        after, end = self._after_answer(new_messages, tools, is_next=True), self._own.decode([stop])
        if not after.startswith(end):
            return None
        ids = [*previous_prompt_ids, *previous_completion_ids]
        new = self._own.encode(after.removeprefix(end))
        return RenderedTokens(token_ids=[*ids, *new], message_indices=[-1] * (len(ids) + len(new)))

    def _after_answer(
        self, new_messages: Sequence[Any], tools: list[Any] | None, *, is_next: bool
    ) -> str:
        """The template's text after an answer, up to the beginning of the next one if `is_next`."""
        before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _ANSWER}]
        options = dict(self.config.model_extra or {})
        text = self._own.text_of(
            [*before, *new_messages], tools=tools, add_generation_prompt=is_next, **options
        )
        return text.partition(_ANSWER)[2]


def _special_tokens(folder: Path) -> dict[str, str]:
    """bos_token and its like, which templates write by name."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> str:
    raise TemplateError(message)

"""Prompts as a language model reads them: in the chat template of its tokenizer, or plain."""

from __future__ import annotations

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from modalities.errors import UserError


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, chat_template: bool | None, system_prompt: str | None, owner: str
) -> list[int]:
    """The token ids of a prompt, up to where the response begins; may be empty without a chat template.

    `chat_template` None uses the tokenizer's template if it has one. `owner` is what a message calls the model. Raises
    UserError for a template that is missing or refuses the messages.
    """
    has_template = tokenizer.chat_template is not None
    if not (has_template if chat_template is None else chat_template) and system_prompt is None:
        return list(tokenizer(text).input_ids)
    if not has_template:
        key = "system_prompt" if system_prompt is not None else "chat_template"
        raise UserError(f"{owner}: {key} is set, but the tokenizer has no chat template.")
    messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    messages.append({"role": "user", "content": text})
    try:
        filled = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise UserError(f"{owner}: the chat template refuses messages of {roles}: {error}") from error
    return list(tokenizer(filled, add_special_tokens=False).input_ids)

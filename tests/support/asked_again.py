"""One question in forty forms, and answers without worth: what a user gets who asks again and again."""

from __future__ import annotations

_OPENINGS = ["", "Hi! ", "Short question. ", "Me again. ", "Sorry to bother you. "]
USELESS = [
    "I don't know.",
    "I'm sorry, I don't have any information about that in our conversation.",
    "I could not find that, could you tell me?",
    "Unfortunately I have no record of that.",
]
ASKED = [
    "On which port does the staging database listen?",
    "Which port does the staging database listen on?",
    "Do you remember the port of the staging database?",
    "What is the staging database's port?",
    "Port of the staging database, please?",
    "Could you tell me on which port our staging database listens?",
    "I forgot the port of the staging database, which one is it?",
    "Quick one: staging database, which port?",
]
SIMILAR = [f"{opening}{asked}" for asked in ASKED for opening in _OPENINGS]

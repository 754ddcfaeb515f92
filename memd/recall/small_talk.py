"""Whether a message only greets, thanks or reacts, so that nothing stored can be what it asks for.

Rule: pure, and certain: a message with any other word is none ("thanks, and the port?"), nor is one that tells to go
on ("yes", "do it", "weiter"), whose sense is in what stands before it. Whatever else nothing is stored about is told by
the lack of evidence, in any language (`retrieval.min_evidence`).
"""

from __future__ import annotations

import re

from memd.store.lexical.analyzer import as_seen

CHARACTERS_MAX = 80

_SAID = """
    hi hello hey heya hiya yo howdy greetings morning evening afternoon goodbye bye byebye cya farewell goodnight
    night thanks thank thx ty tysm cheers sorry oops lol haha hahaha hehe rofl lmao wow cool nice great awesome
    perfect excellent amazing fantastic wonderful brilliant splendid lovely sweet
    yay hooray congrats congratulations welcome
    hallo moin servus grüezi guten morgen abend tschüss tschüs tschau ciao danke dankeschön vielen dank super
    toll klasse entschuldigung
    bonjour salut bonsoir coucou merci revoir bientôt parfait génial désolé bravo
    hola buenos buenas adiós gracias perfecto genial
    buongiorno buonasera arrivederci grazie perfetto ottimo scusa
    olá oi obrigado obrigada tchau valeu perfeito ótimo
    hoi dag goedemorgen goedenavond doei bedankt dank
    cześć witaj hej dziękuję dzięki pa świetnie super
    tack hejdå takk kiitos terve
    merhaba selam günaydın teşekkürler teşekkür sağol görüşürüz hoşçakal
    привет здравствуйте здравствуй спасибо пока отлично супер
    こんにちは こんばんは おはよう おはようございます ありがとう ありがとうございます おやすみ おやすみなさい さようなら
    你好 您好 早上好 晚上好 晚安 谢谢 多谢 再见 안녕 안녕하세요 감사합니다 고마워요 고마워
    谢谢你 谢谢您 謝謝 謝謝你 謝謝您 多謝 早安
    مرحبا شكرا أهلا سلام धन्यवाद नमस्ते नमस्कार शुक्रिया
    תודה שלום ευχαριστώ ευχαριστούμε γεια καλημέρα καλησπέρα cảm ơn terima kasih
    ขอบคุณ ขอบคุณครับ ขอบคุณค่ะ สวัสดี สวัสดีครับ สวัสดีค่ะ
"""
_BESIDE = """
    you u ya so very much lot lots a an the all for today now again there everyone everybody team mate man dude
    buddy how are is it its that thats s re m i am one this was were me of help your really quite too most good well
    fine later tomorrow soon then see talk have day weekend whats up going doing ok okay oh ah and to bad indeed no
    geht s es dir ihnen wie das war s alles klar bis später morgen einen schönen tag noch für die hilfe sehr gute
    nacht ça va bien beaucoup au bonne nuit journée à demain tout le monde et toi vous c est
    qué tal cómo estás muchas por todo hasta mañana luego noches días tardes muy bien
    come stai mille a domani tutto molto bene notte
    tudo bem bom boa dia noite até amanhã muito você
    je wel fijne avond hoe gaat het met jou goed
    dzień dobry bardzo do jutra dobranoc jak się masz wieczór
    så mycket bra nasılsın iyi geceler ederim çok добрый день вечер доброе утро большое как дела очень جزيلا لك
"""
_PHRASES = frozenset({"got it", "sounds good", "no problem", "no worries", "what s up", "my pleasure"})
_WORD = re.compile(r"[\w\u0900-\u0963\u0971-\u0d7f\u0e31-\u0e4e]+")
"""The vowel signs of India's scripts and of Thai are no letters to `re`."""


def _words(text: str) -> list[str]:
    return _WORD.findall(as_seen(text).casefold().replace("i\u0307", "i"))


_SAID_WORDS = frozenset(_words(_SAID))
_ANY_WORDS = _SAID_WORDS | frozenset(_words(_BESIDE))


def is_small_talk(text: str) -> bool:
    """Whether a text has no words but those of greeting, thanks, farewell and applause; or none at all."""
    if len(text) > CHARACTERS_MAX:
        return False
    words = _words(text)
    if not words or " ".join(words) in _PHRASES:
        return True
    return _ANY_WORDS.issuperset(words) and not _SAID_WORDS.isdisjoint(words)

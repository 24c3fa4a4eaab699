"""Makes messages of 100 to 200 words, whose class one to three of their sentences decide."""

import random
import re

from few_labels import Question

# Sentences of each class; held-out texts have only the last three.
DECISIVE = {
    "billing": """I was charged twice for the same month. The invoice shows the wrong amount. My
        card was debited although I paid in advance. Please refund the fee from March. The receipt
        lists a tax that does not apply to us. Your price went up without any notice. The discount
        code was not applied to the bill. I need a copy of the last payment statement.""",
    "login": """The password reset link does not work. I cannot sign in with my new phone. My
        account is locked after three attempts. The verification code never arrives. The app
        rejects my user name. Two-factor authentication fails every time. It says that my
        credentials are invalid. I am logged out again after a minute.""",
    "delivery": """The parcel has not arrived yet. The courier left the box in the rain. Tracking
        has shown the same city for a week. The package went to my old address. One of the two
        boxes was damaged in transit. Nobody rang the bell when the driver came. The shipment is
        stuck at customs. The order was sent to the wrong street.""",
    "cancellation": """I want to end my subscription today. Please close my contract at the end of
        the year. We will not renew our plan. I would like to terminate the membership. Stop the
        automatic renewal please. We are leaving for another provider. Kindly confirm that my plan
        is cancelled. I hereby withdraw from the agreement.""",
}
FILLER = """Hello and thank you for reading this message. I have been a customer for many years
    now. My brother recommended your company to me last summer. The weather here has been terrible
    all week long. I work from home and I have two small children. We moved to a bigger flat in the
    north of the town. Your colleague on the phone was very friendly and patient. I tried to find
    an answer on your website first. Usually everything works well and I am quite happy. I am
    writing from my tablet, so please excuse any mistakes. My wife and I both use the service in
    the evening. The last few days have been rather busy for me. I hope that you can help me soon
    with this. Perhaps other people have told you about the same thing. You can call me in the
    morning or after six. I will be on holiday from the tenth of the month. The new design of your
    pages looks really good. I also wrote to you about something else in spring. My neighbor had a
    similar experience some time ago. Let me explain what happened from the beginning. It all
    started on a Monday, just before lunch. I am not an expert, so please use simple words. There
    is no need to hurry, but it matters to me. Thanks again and have a nice day."""


def make_long_texts(count: int, *, held_out: bool) -> list[Question]:
    """Return texts of 100 to 200 words with their class, which one to three sentences decide."""
    draw, texts = random.Random(held_out), []
    filler, *decisive = (re.findall(r"\S[^.]*\.", " ".join(text.split()))
                         for text in (FILLER, *DECISIVE.values()))  # fmt: skip
    for number in range(count):
        label, own = [*DECISIVE][number % 4], decisive[number % 4]
        chosen = draw.sample(own[-3:] if held_out else own[:-3], draw.choice([1, 1, 2, 3]))
        chosen += draw.sample(filler, draw.randint(10, 16))
        texts.append((" ".join(draw.sample(chosen, len(chosen))), label))
    return texts

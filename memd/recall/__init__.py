"""From a question to the chunks that are shown, and corrections of them."""

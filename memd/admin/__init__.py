"""memd's own routes under `/memd/`: reading, correcting, receipts, the page."""

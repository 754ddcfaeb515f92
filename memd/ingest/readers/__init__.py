"""Documents: files read into sections that know their headings, page or sheet."""

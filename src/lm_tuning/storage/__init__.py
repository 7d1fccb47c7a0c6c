"""Keep files and folders whole: written aside, then renamed; found again by key; locked while in use."""

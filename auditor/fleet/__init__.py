"""Many models audited side by side, each in a process of its own, with one page about all of them."""

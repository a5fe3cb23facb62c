"""GrandCode (2604.02721): seats that conjecture, solve, summarise and test; tests that separate."""

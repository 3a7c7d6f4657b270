"""The command line: ``app`` dispatches and maps errors to exit codes, ``output`` prints, one file a verb."""

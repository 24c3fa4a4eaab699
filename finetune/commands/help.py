"""Help of a command with many options: those of each section of a configuration in a group."""

import click

from finetune.config.schema import SECTION_OF_OPTION


class GroupedCommand(click.Command):
    """Lists its own options first, then those of the schema under the names of their sections."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each group."""
        groups: dict[str, list[tuple[str, str]]] = {"options": []}
        groups |= {section: [] for section in SECTION_OF_OPTION.values()}
        for parameter in self.get_params(context):
            if (record := parameter.get_help_record(context)) is not None:
                groups[SECTION_OF_OPTION.get(parameter.name or "", "options")].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name.capitalize()):
                    formatter.write_dl(records)

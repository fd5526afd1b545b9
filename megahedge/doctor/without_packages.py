"""What is left of the report where a package that everything needs cannot be imported: which one, and why."""

from megahedge.doctor.options import DoctorOptions
from megahedge.doctor.report import Section, examine, publish
from megahedge.doctor.software import PackageTrial, look_at_software


def doctor(options: DoctorOptions, error: Exception) -> int:
    """Print the section on software alone and return 1.  error: what importing the rest has raised."""

    def look(section: Section) -> None:
        look_at_software(section, PackageTrial())
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        section.problems.append(f"megahedge cannot be imported ({reason}), and nothing else was examined; mend its packages first")

    publish([examine("software", look)], options.json)
    return 1

"""Everything is in pyproject.toml except what a table cannot say: the top level's configs travel in the package."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages("src"), "omniw4.configs"],
    package_dir={"": "src", "omniw4.configs": "configs"},
    package_data={
        "omniw4.configs": ["*.yaml"],
        "omniw4.roofline": ["*.yaml"],
        "omniw4.report": ["*.css"],
        "omniw4._ext": ["*.so"],
    },
)

"""Scripts and configs of other projects, turned into configs of this one."""

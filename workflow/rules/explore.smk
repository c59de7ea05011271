PAGE = report(
    f"{RESULTS}/{{study}}/explore.html",
    caption="../report/explore.rst",
    category="Report",
    labels={"figure": "All cells to explore"},
)
ADDED["report"].outputs.append(PAGE)

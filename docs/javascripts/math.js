// Typesets formulas with KaTeX, which is part of the site: no request to another host.
document$.subscribe(({ body }) =>
  renderMathInElement(body, {
    delimiters: [
      { left: "\\[", right: "\\]", display: true },
      { left: "\\(", right: "\\)", display: false },
    ],
  }),
);

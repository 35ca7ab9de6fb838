// Guides come before measurements, and pages before the API reference.
var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    docname.startsWith("docs/project/") ? score / 4 : docname.startsWith("docs/start/migration/") ? score / 2 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 0, 1: -2, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

// The OpenAPI description as a page.

import { $, element } from "./api.js";

const description = await (await fetch("/openapi.json")).json();
const resolve = (schema) => (schema?.$ref ? description.components.schemas[schema.$ref.split("/").at(-1)] : schema);
const typeOf = (schema) => schema.type ?? (schema.anyOf ?? []).map((one) => one.type ?? "object").join(" or ") ?? "any";

function rows(fields) {
  return element("table", {}, ...fields.map(([name, type, text]) =>
    element("tr", {}, element("td", {}, element("code", {}, name)), element("td", {}, type), element("td", {}, text ?? ""))));
}

for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, about] of Object.entries(methods)) {
    const article = element("article", {}, element("h3", {}, element("span", { class: "method" }, method.toUpperCase()), element("code", {}, path)));
    article.append(element("p", {}, about.description ?? ""));
    const queries = (about.parameters ?? []).filter((one) => one.in === "query");
    if (queries.length) article.append(rows(queries.map((one) => [one.name, typeOf(one.schema), one.description])));
    const body = resolve(about.requestBody?.content?.["application/json"]?.schema);
    if (body) article.append(rows(Object.entries(body.properties).map(([name, schema]) => [name, typeOf(schema), schema.description])));
    $("paths").append(article);
  }
}
document.documentElement.dataset.ready = "";

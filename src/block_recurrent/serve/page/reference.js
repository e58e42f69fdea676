// The OpenAPI description as a page.

import { $, element } from "./api.js";

const description = await (await fetch("/openapi.json")).json();
const resolve = (schema) => (schema?.$ref ? description.components.schemas[schema.$ref.split("/").at(-1)] : schema);

function typeOf(schema) {
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {})}`;
  const types = (schema.anyOf ?? [schema]).map((one) => (one === schema ? one.type : typeOf(one)) ?? "object");
  return [...new Set(types)].filter((type) => type && type !== "null").join(" or ");
}

function field(name, schema, required, text) {
  const known = schema.default !== undefined && schema.default !== null && schema.default !== "";
  const type = `${schema.type || schema.anyOf ? typeOf(schema) : "any"}${required ? ", required" : known ? `, default ${schema.default}` : ""}`;
  return [element("dt", {}, element("code", {}, name), element("small", {}, type)), element("dd", {}, text ?? "")];
}

for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, about] of Object.entries(methods)) {
    const heading = element("h2", {}, element("span", { class: `method ${method}` }, method.toUpperCase()), element("code", {}, path));
    const article = element("article", {}, heading, element("p", {}, about.description ?? ""));
    const fields = (about.parameters ?? []).filter((one) => one.in === "query").flatMap((one) => field(one.name, one.schema, one.required, one.description ?? one.schema.description));
    const body = resolve(about.requestBody?.content?.["application/json"]?.schema);
    for (const [name, schema] of Object.entries(body?.properties ?? {})) fields.push(...field(name, schema, body.required?.includes(name), schema.description));
    const raw = Object.keys(about.requestBody?.content ?? {}).find((type) => type !== "application/json");
    if (raw) fields.unshift(element("dt", {}, "body", element("small", {}, raw)), element("dd", {}));
    if (fields.length) article.append(element("dl", {}, ...fields));
    $("paths").append(article);
  }
}
document.documentElement.dataset.ready = "";

// The page at "/docs". The schema tells of the models, so where tokens are set it needs one: until then what is shown is
// a schema with nothing but the Authorize button, whose token, if it is right, brings the whole one.
const SCHEME = "bearer";

function locked(problem) {
  return {
    openapi: "3.1.0",
    info: { title: "orchestray", version: "", description: problem },
    paths: {},
    components: { securitySchemes: { [SCHEME]: { type: "http", scheme: "bearer" } } },
    security: [{ [SCHEME]: [] }],
  };
}

function remembered() {
  try { return sessionStorage.getItem("token"); } catch { return null; }
}

function remember(token) {
  try { token ? sessionStorage.setItem("token", token) : sessionStorage.removeItem("token"); } catch { /* not kept */ }
}

async function schema(token) {
  const answer = await fetch("openapi.json", { headers: token ? { Authorization: `Bearer ${token}` } : {} });
  if (answer.ok) return { whole: true, spec: await answer.json() };
  if (answer.status === 401 && !token) return { spec: locked("This endpoint asks for a token: press Authorize.") };
  return { spec: locked((await answer.json()).error) };
}

async function show(system, token) {
  const { whole, spec } = await schema(token);
  remember(whole ? token : null);
  system.specActions.updateSpec(JSON.stringify(spec));
}

// What is given to Authorize is used for the schema, too.
const follow = (system) => ({
  statePlugins: {
    auth: {
      wrapActions: {
        authorize: (original) => (given) => {
          const done = original(given);
          show(system, given[SCHEME]?.value);
          return done;
        },
        logout: (original) => (names) => {
          const done = original(names);
          show(system, null);
          return done;
        },
      },
    },
  },
});

const token = remembered();
const first = await schema(token);
const ui = SwaggerUIBundle({
  spec: first.spec,
  dom_id: "#docs",
  deepLinking: true,
  validatorUrl: null,
  plugins: [follow],
  onComplete: () => { if (first.whole && token) ui.preauthorizeApiKey(SCHEME, token); },
});

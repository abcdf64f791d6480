// Named checks of one client for Node, as in checks.py: each prints its result as a line of JSON after MARK.
const MARK = "CHECK ";
export const URL_ = process.env.EYAS_URL;
export const MODEL = process.env.EYAS_MODEL;
export const PROMPT = "def add(left, right):\n    return";
export const MESSAGES = [{ role: "user", content: "Write a function that adds two numbers." }];

export async function check(feature, body) {
  let problem = "";
  try {
    await body();
  } catch (error) {
    problem = `${error.name}: ${String(error.message).trim().split("\n")[0].slice(0, 300)}`;
  }
  console.log(MARK + JSON.stringify({ feature, problem }));
}

export function require_(condition, problem) {
  if (!condition) throw new Error(problem);
}

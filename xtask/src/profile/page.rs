//! The page of a profile: `page.html` with the numbers, which its script draws. It needs no network.

use serde_json::Value;

const TEMPLATE: &str = include_str!("page.html");
/// Maximum number of samples in the page, far more than a screen can show.
const MAX_SAMPLES: usize = 4000;

/// The page of a `profile.json`.
pub fn html(mut numbers: Value) -> String {
    let samples = numbers["samples"].as_array().map_or(&[][..], Vec::as_slice);
    let (taken, each) = (samples.len(), samples.len().div_ceil(MAX_SAMPLES).max(1));
    numbers["samples"] = samples.iter().step_by(each).cloned().collect();
    numbers["taken"] = taken.into();
    // Only `<` can end a script element, and in JSON it stands only in strings.
    TEMPLATE.replacen("PROFILE", &numbers.to_string().replace('<', "\\u003c"), 1)
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::{nothing, phone};
    use super::*;
    use std::process::Command;

    /// Draws the page in node with a fake document, and checks it by `page.test.js`.
    fn draw(page: &str, expectations: &str) {
        let file =
            std::env::temp_dir().join(format!("xtask-page-{}-{expectations}.html", std::process::id()));
        std::fs::write(&file, page).unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/profile/page.test.js");
        match Command::new("node").arg(script).arg(&file).arg(expectations).output() {
            Ok(out) => assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr)),
            Err(e) => eprintln!("the page's script is not checked: node: {e}"),
        }
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_page_has_every_chart_names_are_text_and_nothing_is_fetched() {
        let page = html(phone().json());
        // For looking at it: ANTIGRAVITY_PAGE=FILE cargo test -p xtask page
        if let Some(file) = std::env::var_os("ANTIGRAVITY_PAGE") {
            std::fs::write(file, &page).unwrap();
        }
        assert!(page.contains("name=\"viewport\"") && page.contains("prefers-color-scheme:dark"));
        draw(&page, "phone");
        assert!(page.contains("R58M \\u003c1>") && page.contains("\\u003ci>opencl\\u003c/i>"));
        assert_eq!((page.matches("<script").count(), page.matches("</script>").count()), (2, 2));
        assert!(!page.contains("PROFILE") && !page.contains("innerHTML"));
        let page = page.replace("\"http://www.w3.org/2000/svg\"", "the name of a format");
        for fetch in ["src=", "href=", "http:", "https:", "url(", "@import"] {
            assert!(!page.contains(fetch), "{fetch}");
        }
    }

    #[test]
    fn an_empty_page_says_so_and_a_day_of_samples_is_thinned() {
        draw(&html(nothing().json()), "nothing");
        let numbers = serde_json::json!({"samples": vec![1; 400_000]});
        assert!(html(numbers).len() < TEMPLATE.len() + 3 * MAX_SAMPLES);
    }
}

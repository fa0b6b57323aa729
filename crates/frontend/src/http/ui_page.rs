//! The page at `/ui`, which shows what the server does now. The page takes nothing from another server,
//! asks `GET` requests alone, and changes nothing.

use axum::Router;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY};
use axum::response::Response;
use axum::routing::get;

use super::docs_page::answer;

/// The files of the page: route, kind, and text.
const FILES: [(&str, &str, &str); 5] = [
    ("/ui", "text/html; charset=utf-8", include_str!("../../ui_page/index.html")),
    ("/ui/app.css", "text/css; charset=utf-8", include_str!("../../ui_page/app.css")),
    ("/ui/app.js", "text/javascript; charset=utf-8", include_str!("../../ui_page/app.js")),
    ("/ui/uplot.css", "text/css; charset=utf-8", include_str!("../../ui_page/uplot.css")),
    ("/ui/uplot.js", "text/javascript; charset=utf-8", include_str!("../../ui_page/uplot.js")),
];

/// uPlot sets styles of its elements. All requests go to this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self' data:; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The routes of the page's files.
pub(super) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    let with = |routes: Router<S>, (route, kind, text): (&'static str, &'static str, &'static str)| {
        routes.route(route, get(move || async move { file(kind, text) }))
    };
    FILES.into_iter().fold(Router::new(), with)
}

/// Whether a route is a file of the page, which is the same on every server.
pub(super) fn has(route: &str) -> bool {
    FILES.iter().any(|(its, ..)| *its == route)
}

fn file(kind: &'static str, text: &'static str) -> Response {
    // Another version of the server has another page, so that no browser keeps a file unasked.
    let kept = (CACHE_CONTROL, "no-cache");
    answer(text, [(CONTENT_TYPE, kind), (CONTENT_SECURITY_POLICY, POLICY), (REFERRER_POLICY, "no-referrer"), kept])
}

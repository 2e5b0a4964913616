//! Access control: API keys, or without keys a check of `Host` and `Origin`. A browser lets any web page send requests
//! to this machine. `Origin` reveals a foreign page, and `Host` a foreign name that points here (DNS rebinding).

use super::error::{ApiError, ApiResult};
use files::error::quote;
use files::{Error, Result};
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use hyper::http::request::Parts;
use std::net::IpAddr;

/// A client that passed access control.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ApiClient {
    /// Index of its key, if the server has keys.
    pub key_index: Option<usize>,
}

/// Tells if `names` contains `name`, ignoring case; `*` matches every name.
fn contains_name(names: &[String], name: &str) -> bool {
    names.iter().any(|known| known == "*" || known.eq_ignore_ascii_case(name))
}

/// Access rules.
pub struct AccessRules {
    keys: Vec<String>,
    /// Origins allowed without a key.
    origins: Vec<String>,
    /// Host names accepted without a key.
    hosts: Vec<String>,
    /// Address that the server listens on.
    address: Option<IpAddr>,
}

impl AccessRules {
    /// Rules from keys, the server's own `host`, `--cors-origin` and `--allowed-host`.
    ///
    /// # Errors
    ///
    /// `Usage` if an origin or a host name is malformed.
    pub fn new(keys: Vec<String>, host: &str, origins: &[String], hosts: &[String]) -> Result<Self> {
        for origin in origins {
            let rest = origin.split_once("://").map(|(_, rest)| rest.trim_end_matches('/'));
            let is_one = rest.is_some_and(|rest| !rest.is_empty() && !rest.contains(['/', ' ', '?', '#']));
            if !is_one && !matches!(origin.as_str(), "*" | "null") {
                let why = "is not an origin; use one such as http://localhost:3000, or * for any";
                return Err(Error::Usage(format!("--cors-origin {}: {why}", quote(origin))));
            }
        }
        if let Some(name) = hosts.iter().find(|name| name.is_empty() || name.contains(['/', ' '])) {
            let why = "is not a host name; use one such as box.example, or * for any";
            return Err(Error::Usage(format!("--allowed-host {}: {why}", quote(name))));
        }
        let hosts = ["localhost", host].into_iter().chain(hosts.iter().map(|name| host_name(name)));
        Ok(Self {
            keys,
            origins: origins.iter().map(|origin| origin.trim_end_matches('/').to_owned()).collect(),
            hosts: hosts.map(str::to_owned).collect(),
            address: None,
        })
    }

    /// Sets the address that the server listens on.
    pub fn listening_at(self, address: IpAddr) -> Self {
        Self { address: Some(address), ..self }
    }

    fn allows_all_origins(&self) -> bool {
        contains_name(&self.origins, "*")
    }

    /// Tells if requests need a key.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Finds the client of a key, in constant time for keys of one length. Without keys everybody is a client.
    pub fn authenticate_client(&self, key: Option<&[u8]>) -> Option<ApiClient> {
        let given = key.unwrap_or_default();
        let matches = |key: &String| {
            let differs = key.bytes().zip(given.iter().chain(std::iter::repeat(&0)));
            let sum = differs.fold(key.len() ^ given.len(), |sum, (a, b)| sum | usize::from(a ^ b));
            std::hint::black_box(sum) == 0
        };
        let number = |found: Option<usize>, (i, key)| {
            let matches = matches(key);
            found.or(matches.then_some(i))
        };
        match self.keys.iter().enumerate().fold(None, number) {
            None if self.has_keys() => None,
            key => Some(ApiClient { key_index: key }),
        }
    }

    /// Refuses requests of foreign pages and for foreign host names, unless there are keys.
    pub fn check_origin(&self, head: &Parts) -> ApiResult<()> {
        if self.has_keys() {
            return Ok(());
        }
        let refuse = |what: String| Err(ApiError::new(403, what));
        let hosts =
            header_values(&head.headers, "host").chain(head.uri.authority().map(|of| Some(of.as_str())));
        let mut hosts = hosts.map(|host| host.map(host_name).unwrap_or_default());
        if let Some(name) = hosts.find(|name| !self.is_own_host(name)) {
            let remedy = "start the server with --allowed-host NAME or with a key";
            return refuse(format!("host {} is not allowed; {remedy}", quote(name)));
        }
        let remedy = "start the server with --cors-origin ORIGIN or with a key";
        let mut origins = header_values(&head.headers, "origin").map(Option::unwrap_or_default);
        if let Some(origin) = origins.find(|origin| !self.is_allowed_origin(origin, &head.headers)) {
            return refuse(format!("origin {} is not allowed; {remedy}", quote(origin)));
        }
        // Requests for a page's images and scripts carry no origin.
        let has = |name, value: &str| header_values(&head.headers, name).any(|of| of == Some(value));
        let is_hidden = has("sec-fetch-site", "cross-site") && !has("sec-fetch-mode", "navigate");
        if is_hidden && !head.headers.contains_key("origin") && !self.allows_all_origins() {
            return refuse(format!("pages of other sites are not allowed; {remedy}"));
        }
        Ok(())
    }

    /// Value of `Access-Control-Allow-Origin`: the foreign origin that may read the response.
    pub fn allowed_reader(&self, head: &Parts) -> Option<HeaderValue> {
        self.check_origin(head).ok()?;
        let any = (self.has_keys() || self.allows_all_origins()).then_some(HeaderValue::from_static("*"));
        // The origin itself rather than `*`, so that a response cached for one page is not used for another.
        head.headers.get("origin").cloned().or(any)
    }

    /// Tells if a host name or address belongs to this server.
    fn is_own_host(&self, name: &str) -> bool {
        let address = name.trim_matches(['[', ']']).parse::<IpAddr>().map(|ip| ip.to_canonical());
        let is_here = |ip: IpAddr| {
            ip.is_loopback()
                || self.address.is_some_and(|own| own.is_unspecified() || own.to_canonical() == ip)
        };
        contains_name(&self.hosts, name) || address.is_ok_and(is_here)
    }

    /// Tells if an origin is the server's own, or allowed by `--cors-origin`.
    fn is_allowed_origin(&self, origin: &str, headers: &HeaderMap) -> bool {
        let place = origin.split_once("://").filter(|(scheme, _)| matches!(*scheme, "http" | "https"));
        let own = |host: &str| {
            place.is_some_and(|(_, place)| place.eq_ignore_ascii_case(host))
                && self.is_own_host(host_name(host))
        };
        contains_name(&self.origins, origin)
            || header_values(headers, "host").any(|host| host.is_some_and(own))
    }
}

/// All values of a header; `None` for one that is not text.
fn header_values<'a>(headers: &'a HeaderMap, name: &'static str) -> impl Iterator<Item = Option<&'a str>> {
    headers.get_all(name).iter().map(|value| value.to_str().ok())
}

/// Host name of `name:port`.
fn host_name(host: &str) -> &str {
    let end = if host.starts_with('[') { host.find(']').map(|at| at + 1) } else { host.rfind(':') };
    host[..end.unwrap_or(host.len())].trim_end_matches('.')
}

/// Refuses a key that cannot be sent in a header. `place` names its flag or its line in a file.
///
/// # Errors
///
/// `Usage`.
pub fn check_key(place: &str, key: &str) -> Result<()> {
    let why = match key {
        _ if key.trim().is_empty() => "is empty; give a key, or omit the flag",
        _ if !key.bytes().all(|byte| matches!(byte, b' '..=b'~')) => {
            "contains a line break, a control or a non-ASCII character, which a header cannot carry; use another key"
        }
        _ if key.trim() != key => "begins or ends with a space, which a header does not keep; remove it",
        _ => return Ok(()),
    };
    Err(Error::Usage(format!("{place}: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::Request;

    fn access(keys: &[&str], origins: &[&str], hosts: &[&str]) -> AccessRules {
        let [keys, origins, hosts] =
            [keys, origins, hosts].map(|all| all.iter().map(|s| s.to_string()).collect());
        AccessRules::new(keys, "127.0.0.1", &origins, &hosts).unwrap().listening_at([127, 0, 0, 1].into())
    }

    /// Tells if a request with these headers is answered, and if a page may read the answer.
    fn asks(access: &AccessRules, headers: &str) -> (bool, bool) {
        let mut request = Request::builder().uri("/props");
        for (name, value) in headers.split(" | ").filter_map(|line| line.split_once(": ")) {
            request = request.header(name, value);
        }
        let head = request.body(()).unwrap().into_parts().0;
        (access.check_origin(&head).is_ok(), access.allowed_reader(&head).is_some())
    }

    #[test]
    fn only_a_complete_api_key_is_accepted() {
        let two = access(&["secret", "other key", "secret"], &[], &[]);
        for (key, number) in [
            ("secret", Some(0)),
            ("other key", Some(1)),
            ("secre", None),
            ("secret ", None),
            ("", None),
            ("Secret", None),
            ("secret\0", None),
        ] {
            let client = two.authenticate_client(Some(key.as_bytes()));
            assert_eq!(client, number.map(|n| ApiClient { key_index: Some(n) }), "{key:?}");
        }
        assert_eq!(two.authenticate_client(None), None);
        assert_eq!(access(&[], &[], &[]).authenticate_client(None), Some(ApiClient::default()));
        for bad in ["", " ", "a\nb", "a\tb", "a\r", " a", "a ", "k\u{e4}se", "\u{0}"] {
            assert!(check_key("--api-key", bad).is_err(), "{bad:?}");
        }
        assert!(check_key("--api-key", "sk-a b~").is_ok());
    }

    #[test]
    fn without_a_key_only_known_hosts_and_pages_ask() {
        let plain = access(&[], &[], &[]);
        for (headers, answered) in [
            ("", true),
            ("Host: localhost", true),
            ("Host: LOCALHOST.:1234", true),
            ("Host: 127.0.0.1:8080", true),
            ("Host: 127.9.0.1", true),
            ("Host: [::1]:8080", true),
            ("Host: evil.example:8080", false),
            ("Host: localhost.evil.example", false),
            ("Host: localhost | Host: evil.example", false),
            ("Host: 192.168.1.2:8080", false),
            ("Host: ", false),
            ("Host: \u{e9}", false),
            ("Host: localhost:80 | Origin: http://localhost:80", true),
            ("Host: localhost:80 | Origin: http://localhost:81", false),
            ("Host: localhost:80 | Origin: http://127.0.0.1:80", false),
            ("Host: localhost:80 | Origin: null", false),
            ("Host: localhost:80 | Origin: ftp://localhost:80", false),
            ("Host: localhost:80 | Origin: http://localhost:80 | Origin: http://evil.example", false),
            ("Host: localhost | Sec-Fetch-Site: cross-site | Sec-Fetch-Mode: no-cors", false),
            ("Host: localhost | Sec-Fetch-Site: cross-site | Sec-Fetch-Mode: navigate", true),
            ("Host: localhost | Sec-Fetch-Site: same-origin | Sec-Fetch-Mode: cors", true),
        ] {
            let (found, read) = asks(&plain, headers);
            assert_eq!(found, answered, "{headers}");
            assert!(answered || !read, "{headers}");
        }
        let open = access(&[], &["http://page.example/", "null"], &["Box.example:80"]);
        for (headers, answered) in [
            ("Host: box.example:9 | Origin: https://box.example:9", true),
            ("Host: localhost | Origin: http://PAGE.example", true),
            ("Host: localhost | Origin: null", true),
            ("Host: localhost | Origin: https://page.example", false),
            ("Host: other.example | Origin: http://page.example", false),
        ] {
            assert_eq!(asks(&open, headers).0, answered, "{headers}");
        }
        let foreign = "Host: evil.example | Origin: http://evil.example | Sec-Fetch-Site: cross-site";
        assert_eq!(asks(&access(&[], &["*"], &["*"]), foreign), (true, true));
        assert_eq!(asks(&access(&["key"], &[], &[]), foreign), (true, true));
        let everywhere = access(&[], &[], &[]).listening_at([0, 0, 0, 0].into());
        assert!(asks(&everywhere, "Host: 192.168.1.2:8080 | Origin: http://192.168.1.2:8080").0);
        assert!(!asks(&everywhere, "Host: evil.example").0);
    }

    #[test]
    fn flags_that_name_no_origin_and_no_host_are_refused() {
        for (origin, host) in
            [("page.example", "a"), ("http://", "a"), ("http://a/b", "a"), ("*", ""), ("*", "a/b")]
        {
            let found = AccessRules::new(Vec::new(), "localhost", &[origin.into()], &[host.into()]);
            assert!(found.is_err(), "{origin} {host}");
        }
    }
}

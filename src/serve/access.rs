//! Who may ask: those with a key; where none is asked for, programs of this machine and pages that the server knows. A
//! browser lets any page of the web send requests to this machine, so that a page is known by its `Origin`, and a name
//! that leads here by the design of somebody else (DNS rebinding) by its `Host`.

use super::error::{ApiError, ApiResult};
use files::error::quoted;
use files::{Error, Result};
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use hyper::http::request::Parts;
use std::net::IpAddr;

/// A client that may ask.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Client {
    /// The number of its key, where keys are asked for.
    pub key: Option<usize>,
}

/// Whether one of some names is this, in either case; `*` stands for all.
fn contains_name(names: &[String], name: &str) -> bool {
    names.iter().any(|known| known == "*" || known.eq_ignore_ascii_case(name))
}

/// Rules for who may ask.
pub struct Access {
    keys: Vec<String>,
    /// Pages that may ask without a key.
    origins: Vec<String>,
    /// Names that the server is reached by without a key.
    hosts: Vec<String>,
    /// Address that it listens at.
    address: Option<IpAddr>,
}

impl Access {
    /// Of keys, and else of the pages and names that flags give; `host` is the server's own name.
    ///
    /// # Errors
    ///
    /// `Usage` for what can be no origin, and no name of a host.
    pub fn new(keys: Vec<String>, host: &str, origins: &[String], hosts: &[String]) -> Result<Self> {
        for origin in origins {
            let rest = origin.split_once("://").map(|(_, rest)| rest.trim_end_matches('/'));
            let is_one = rest.is_some_and(|rest| !rest.is_empty() && !rest.contains(['/', ' ', '?', '#']));
            if !is_one && !matches!(origin.as_str(), "*" | "null") {
                let why = "is no origin; give one such as http://localhost:3000, or * for any";
                return Err(Error::Usage(format!("--cors-origin {}: {why}", quoted(origin))));
            }
        }
        if let Some(name) = hosts.iter().find(|name| name.is_empty() || name.contains(['/', ' '])) {
            let why = "is no name of a host; give one such as box.example, or * for any";
            return Err(Error::Usage(format!("--allowed-host {}: {why}", quoted(name))));
        }
        let hosts = ["localhost", host].into_iter().chain(hosts.iter().map(|name| host_name(name)));
        Ok(Self {
            keys,
            origins: origins.iter().map(|origin| origin.trim_end_matches('/').to_owned()).collect(),
            hosts: hosts.map(str::to_owned).collect(),
            address: None,
        })
    }

    /// Names the address that the server listens at.
    pub fn listening_at(self, address: IpAddr) -> Self {
        Self { address: Some(address), ..self }
    }

    fn lets_all_pages_ask(&self) -> bool {
        contains_name(&self.origins, "*")
    }

    /// Whether keys are asked for at all.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Whose key this is, if anybody's; takes as long for any key of its length.
    pub fn identify(&self, key: Option<&[u8]>) -> Option<Client> {
        let given = key.unwrap_or_default();
        let fits = |key: &String| {
            let differs = key.bytes().zip(given.iter().chain(std::iter::repeat(&0)));
            let sum = differs.fold(key.len() ^ given.len(), |sum, (a, b)| sum | usize::from(a ^ b));
            std::hint::black_box(sum) == 0
        };
        let number = |found: Option<usize>, (i, key)| {
            let fits = fits(key);
            found.or(fits.then_some(i))
        };
        match self.keys.iter().enumerate().fold(None, number) {
            None if self.has_keys() => None,
            key => Some(Client { key }),
        }
    }

    /// Refuses what a foreign page asks, unless there are keys.
    pub fn check(&self, head: &Parts) -> ApiResult<()> {
        if self.has_keys() {
            return Ok(());
        }
        let refuse = |what: String| Err(ApiError::new(403, what));
        let hosts =
            header_values(&head.headers, "host").chain(head.uri.authority().map(|of| Some(of.as_str())));
        for host in hosts {
            let name = host.map(host_name).unwrap_or_default();
            if !self.is_own(name) {
                let name = quoted(name);
                return refuse(format!(
                    "this server does not answer for the host {name}; start it with --allowed-host NAME or with a key"
                ));
            }
        }
        for origin in header_values(&head.headers, "origin") {
            let origin = origin.unwrap_or_default();
            if !self.is_known(origin, &head.headers) {
                let origin = quoted(origin);
                return refuse(format!(
                    "pages of {origin} may not ask this server; start it with --cors-origin ORIGIN or with a key"
                ));
            }
        }
        // A page's picture or script has no origin.
        let says = |name, value: &str| header_values(&head.headers, name).any(|of| of == Some(value));
        let is_hidden = says("sec-fetch-site", "cross-site") && !says("sec-fetch-mode", "navigate");
        if is_hidden && !head.headers.contains_key("origin") && !self.lets_all_pages_ask() {
            let why = "another site's page may not ask this server; start it with --cors-origin ORIGIN or with a key";
            return refuse(why.into());
        }
        Ok(())
    }

    /// Who may read the answer beside the server's own pages: the value of `Access-Control-Allow-Origin`, if there is one.
    pub fn allowed_reader(&self, head: &Parts) -> Option<HeaderValue> {
        self.check(head).ok()?;
        let any = (self.has_keys() || self.lets_all_pages_ask()).then_some(HeaderValue::from_static("*"));
        // A page's origin is named, so that the answer to one is not kept for another.
        head.headers.get("origin").cloned().or(any)
    }

    /// Whether a host's name is one of this server's.
    fn is_own(&self, name: &str) -> bool {
        let address = name.trim_matches(['[', ']']).parse::<IpAddr>().map(|ip| ip.to_canonical());
        let is_here = |ip: IpAddr| {
            ip.is_loopback()
                || self.address.is_some_and(|own| own.is_unspecified() || own.to_canonical() == ip)
        };
        contains_name(&self.hosts, name) || address.is_ok_and(is_here)
    }

    /// Whether pages of an origin may ask: the server's own, and those that a flag names.
    fn is_known(&self, origin: &str, headers: &HeaderMap) -> bool {
        let place = origin.split_once("://").filter(|(scheme, _)| matches!(*scheme, "http" | "https"));
        let own = |host: &str| {
            place.is_some_and(|(_, place)| place.eq_ignore_ascii_case(host)) && self.is_own(host_name(host))
        };
        contains_name(&self.origins, origin)
            || header_values(headers, "host").any(|host| host.is_some_and(own))
    }
}

/// All values of a header; `None` for what is no text.
fn header_values<'a>(headers: &'a HeaderMap, name: &'static str) -> impl Iterator<Item = Option<&'a str>> {
    headers.get_all(name).iter().map(|value| value.to_str().ok())
}

/// The name in `name:port`.
fn host_name(host: &str) -> &str {
    let end = if host.starts_with('[') { host.find(']').map(|at| at + 1) } else { host.rfind(':') };
    host[..end.unwrap_or(host.len())].trim_end_matches('.')
}

/// Refuses a key that no header can hold; `place` is where it stands.
///
/// # Errors
///
/// `Usage`.
pub fn check_key(place: &str, key: &str) -> Result<()> {
    let why = match key {
        _ if key.trim().is_empty() => "is empty; give a key, or leave it out",
        _ if !key.bytes().all(|byte| matches!(byte, b' '..=b'~')) => {
            "holds what no header can: a line's end, a control character or one that is not ASCII; give another key"
        }
        _ if key.trim() != key => "begins or ends with a blank, which no header keeps; leave that out",
        _ => return Ok(()),
    };
    Err(Error::Usage(format!("{place}: {why}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::Request;

    fn access(keys: &[&str], origins: &[&str], hosts: &[&str]) -> Access {
        let [keys, origins, hosts] =
            [keys, origins, hosts].map(|all| all.iter().map(|s| s.to_string()).collect());
        Access::new(keys, "127.0.0.1", &origins, &hosts).unwrap().listening_at([127, 0, 0, 1].into())
    }

    /// Whether a request with these headers is answered, and whether a page may read the answer.
    fn asks(access: &Access, headers: &str) -> (bool, bool) {
        let mut request = Request::builder().uri("/props");
        for (name, value) in headers.split(" | ").filter_map(|line| line.split_once(": ")) {
            request = request.header(name, value);
        }
        let head = request.body(()).unwrap().into_parts().0;
        (access.check(&head).is_ok(), access.allowed_reader(&head).is_some())
    }

    #[test]
    fn only_a_whole_key_opens() {
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
            let client = two.identify(Some(key.as_bytes()));
            assert_eq!(client, number.map(|n| Client { key: Some(n) }), "{key:?}");
        }
        assert_eq!(two.identify(None), None);
        assert_eq!(access(&[], &[], &[]).identify(None), Some(Client::default()));
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
            let found = Access::new(Vec::new(), "localhost", &[origin.into()], &[host.into()]);
            assert!(found.is_err(), "{origin} {host}");
        }
    }
}
